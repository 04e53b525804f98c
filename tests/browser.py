"""A real browser: headless Chromium over a pipe (DevTools protocol)."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
READY = "document.documentElement?.dataset.ready === ''"  # as the page of a report says it
KEYS = {
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
    "Enter": 13,
    "Escape": 27,
    "Tab": 9,
    "Home": 36,
    "End": 35,
    "+": 187,
    "-": 189,
    "0": 48,
}


class Browser:
    """One page at a time; what it logs, asks the network for or alerts is kept."""

    def __init__(self, program: str, folder: Path) -> None:
        # Chromium reads commands from descriptor 3 and answers on 4; ours are moved out of the way.
        to_read, self._out = os.pipe()
        self._in, to_write = os.pipe()
        theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (to_read, to_write)]
        os.close(to_read)
        os.close(to_write)
        start = "import os, sys; a, b, *run = sys.argv[1:]; os.dup2(int(a), 3); os.dup2(int(b), 4)"
        numbers = [str(fd) for fd in theirs]
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-S",
                "-c",
                f"{start}; os.execv(run[0], run)",
                *numbers,
                program,
                *FLAGS,
                f"--user-data-dir={folder}",
                "about:blank",
            ],
            pass_fds=theirs,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"HOME": str(folder)},
        )
        for fd in theirs:
            os.close(fd)
        self._buffer, self._number, self._session = b"", 0, None
        self.forget()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def forget(self) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.dialogs: list[str] = []

    def call(self, method: str, **params: object) -> dict:
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next(30)
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer.get('error')}"
                return answer["result"]

    def open(self, page: Path, width: int = 1280, height: int = 900, ready: str = READY) -> None:
        """Open a page and wait until the expression `ready` is true in it."""
        self.forget()
        self.size(width, height)
        self.call("Page.navigate", url=page.as_uri())
        self.wait(ready)

    def size(self, width: int, height: int = 900, scale: float = 1, mobile: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=mobile,
        )

    def media(self, kind: str = "", **features: str) -> None:
        named = [{"name": k.replace("_", "-"), "value": v} for k, v in features.items()]
        self.call("Emulation.setEmulatedMedia", media=kind, features=named)

    def js(self, expression: str) -> object:
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str, seconds: float = 20) -> None:
        end = time.monotonic() + seconds
        while not self.js(f"Boolean({expression})"):
            assert time.monotonic() < end, f"never true: {expression}"
            time.sleep(0.03)

    def settle(self) -> None:
        """Two frames: what was asked for is drawn."""
        self.js("new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))")

    def centre(self, selector: str) -> tuple[float, float]:
        found = json.dumps(selector)
        self.js(
            f"document.querySelector({found}).scrollIntoView({{block: 'center', "
            "behavior: 'instant'})"
        )
        self.settle()
        box = self.js(
            f"(b => [b.x + b.width / 2, b.y + b.height / 2])"
            f"(document.querySelector({found}).getBoundingClientRect())"
        )
        return box[0], box[1]

    def mouse(self, kind: str, x: float, y: float, **more: object) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click_at(self, x: float, y: float) -> None:
        self.mouse("mouseMoved", x, y)
        self.mouse("mousePressed", x, y, button="left", clickCount=1)
        self.mouse("mouseReleased", x, y, button="left", clickCount=1)

    def click(self, selector: str) -> None:
        self.click_at(*self.centre(selector))

    def touch(self, kind: str, *fingers: tuple[float, float]) -> None:
        points = [{"x": x, "y": y, "id": n} for n, (x, y) in enumerate(fingers)]
        self.call("Input.dispatchTouchEvent", type=kind, touchPoints=points)

    def press(self, key: str, shift: bool = False) -> None:
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        more = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key], "modifiers": 8 * shift}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", **more)

    def type(self, selector: str, text: str) -> None:
        self.js(f"(e => {{ e.focus(); e.select(); }})(document.querySelector('{selector}'))")
        self.call("Input.insertText", text=text)

    def screenshot(self, path: Path, whole: bool = False) -> None:
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(data["data"]))

    def close(self) -> None:
        self._session = None
        with contextlib.suppress(OSError, AssertionError):
            self.call("Browser.close")
        os.close(self._out)
        os.close(self._in)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _next(self, seconds: float) -> dict:
        while b"\0" not in self._buffer:
            assert select.select([self._in], [], [], seconds)[0], "Chromium does not answer"
            part = os.read(self._in, 1 << 16)
            assert part, "Chromium has ended"
            self._buffer += part
        line, self._buffer = self._buffer.split(b"\0", 1)
        message = json.loads(line)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, params: dict) -> None:
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:400])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.errors.append(json.dumps(params["args"])[:400])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Page.javascriptDialogOpening":
            self.dialogs.append(params["message"])
            self._number += 1
            closing = {
                "id": self._number,
                "method": "Page.handleJavaScriptDialog",
                "params": {"accept": True},
                "sessionId": self._session,
            }
            os.write(self._out, json.dumps(closing).encode() + b"\0")
