// Building elements without a framework. Text goes in as text, never as HTML: answers come from a model.

type Child = Node | string | null;

/** An element with properties, attributes (aria-*, data-*, for, role) and children. */
export function el<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  given: Record<string, unknown> = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (value === undefined) continue;
    if (name in made && name !== "list") (made as Record<string, any>)[name] = value;
    else made.setAttribute(name, String(value));
  }
  made.append(...children.filter((child): child is Node | string => child !== null));
  return made;
}

/** The element that index.html has under an id. */
export function byId<T extends HTMLElement>(id: string): T {
  const found = document.getElementById(id);
  if (!found) throw new Error(`the page has no #${id}`);
  return found as T;
}
