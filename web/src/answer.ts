// An answer's text as elements: paragraphs, fenced code, inline code and bold. Everything else stays as written.

import { el } from "./dom";

export function renderAnswer(text: string): Node[] {
  const nodes: Node[] = [];
  // A fence that is still open while the answer streams counts to its end.
  const fences = text.split(/^```/m);
  fences.forEach((part, i) => {
    if (i % 2 === 0) {
      const body = i ? part.replace(/^[^\n]*\n/, "") : part;
      if (body.trim()) nodes.push(el("div", { className: "prose" }, ...inline(body.trim())));
    } else {
      const line = part.indexOf("\n");
      const language = line < 0 ? part : part.slice(0, line);
      const code = line < 0 ? "" : part.slice(line + 1).replace(/\n$/, "");
      nodes.push(
        el(
          "figure",
          { className: "code" },
          el("figcaption", {}, el("span", {}, language.trim() || "code"), copyButton(() => code)),
          el("pre", { tabIndex: 0 }, el("code", {}, code)),
        ),
      );
    }
  });
  return nodes;
}

function inline(text: string): (Node | string)[] {
  return text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/).map((part) => {
    if (part.length > 2 && part.startsWith("`") && part.endsWith("`")) return el("code", {}, part.slice(1, -1));
    if (part.length > 4 && part.startsWith("**") && part.endsWith("**")) return el("strong", {}, part.slice(2, -2));
    return part;
  });
}

export function copyButton(text: () => string): HTMLButtonElement {
  const button = el("button", { type: "button", className: "quiet small" }, "Copy");
  button.addEventListener("click", () => {
    void navigator.clipboard?.writeText(text()).then(() => {
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 1200);
    });
  });
  return button;
}
