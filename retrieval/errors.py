"""The one exception that users are meant to see. Imports nothing of ours."""


class DmlError(Exception):
    """What happened, why, and what to do about it. `cli.py` alone renders it."""

    def __init__(self, what: str, why: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.fix = fix

    def __str__(self) -> str:
        return "\n".join(part for part in (self.what, self.why, self.fix) if part)
