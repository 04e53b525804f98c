"use strict";
// Light or dark: as the system says until the button #theme is used, then as the reader chose, which
// is remembered where the browser lets us.

const theme = (() => {
  const KEY = "dmltool-theme";
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;
  const listeners = [];
  const now = () => root.dataset.theme || (dark.matches ? "dark" : "light");

  function remembered(value) {
    try {
      if (value) localStorage.setItem(KEY, value);
      return localStorage.getItem(KEY);
    } catch {
      return null; // storage is blocked: the choice lasts as long as the page
    }
  }

  function show() {
    const other = now() === "dark" ? "Light" : "Dark";
    document.getElementById("theme-name").textContent = other;
    document.getElementById("theme").setAttribute("aria-label", `${other} theme`);
    for (const listener of listeners) listener();
  }

  function start() {
    const button = document.getElementById("theme");
    button.hidden = false;
    button.addEventListener("click", () => {
      root.dataset.theme = now() === "dark" ? "light" : "dark";
      remembered(root.dataset.theme);
      show();
    });
    dark.addEventListener("change", show);
    show();
  }

  const chosen = remembered();
  if (chosen === "light" || chosen === "dark") root.dataset.theme = chosen;
  addEventListener("DOMContentLoaded", start);
  return { now, onChange: (listener) => listeners.push(listener) };
})();
