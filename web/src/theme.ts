// Light, dark, or what the system says.

const KEY = "castiron.theme";
const CHOICES = ["auto", "light", "dark"] as const;

export function installTheme(button: HTMLElement, changed: () => void): void {
  const system = matchMedia("(prefers-color-scheme: dark)");
  let choice = localStorage.getItem(KEY) ?? "auto";

  function apply(): void {
    const dark = choice === "dark" || (choice === "auto" && system.matches);
    document.documentElement.dataset["theme"] = dark ? "dark" : "light";
    button.textContent = `Theme: ${choice}`;
    changed();
  }

  button.addEventListener("click", () => {
    choice = CHOICES[(CHOICES.indexOf(choice as "auto") + 1) % CHOICES.length]!;
    localStorage.setItem(KEY, choice);
    apply();
  });
  system.addEventListener("change", apply);
  apply();
}

/** A colour of the style sheet, for what is drawn on a canvas. */
export function color(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
