// Light, dark, or what the system says. Runs before the page is drawn, so it is not a module.

(() => {
  const KEPT = "penstock-theme";
  const THEMES = ["system", "light", "dark"];

  function apply(theme) {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
  }

  function current() {
    const kept = localStorage.getItem(KEPT);
    return THEMES.includes(kept) ? kept : "system";
  }

  apply(current());
  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme-button");
    const name = (theme) => (button.lastElementChild.textContent = theme);
    name(current());
    button.addEventListener("click", () => {
      const next = THEMES[(THEMES.indexOf(current()) + 1) % THEMES.length];
      localStorage.setItem(KEPT, next);
      apply(next);
      name(next);
    });
  });
})();
