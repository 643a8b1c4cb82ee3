// The playground: a conversation that streams.

import { ApiFailure, streamChat, type Usage } from "./api";
import { copyButton, renderAnswer } from "./answer";
import { byId, el } from "./dom";
import { count, milliseconds, short } from "./format";
import type { Settings } from "./settings";

interface Message {
  role: "user" | "assistant";
  content: string;
}

export class Chat {
  private readonly turns = byId("turns");
  private readonly prompt = byId<HTMLTextAreaElement>("prompt");
  private readonly send = byId<HTMLButtonElement>("send");
  private readonly stop = byId<HTMLButtonElement>("stop");
  private history: Message[] = [];
  private running: AbortController | null = null;

  constructor(private readonly settings: Settings) {
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      void this.ask();
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        void this.ask();
      }
    });
    this.prompt.addEventListener("input", () => this.fit());
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.running?.abort());
    this.stop.addEventListener("click", () => this.running?.abort());
    byId("clear").addEventListener("click", () => this.clear());
    const open = byId("open-settings");
    open.addEventListener("click", () => {
      const shown = byId("view-chat").classList.toggle("with-settings");
      open.setAttribute("aria-expanded", String(shown));
    });
    this.clear();
  }

  private clear(): void {
    this.running?.abort();
    this.history = [];
    this.turns.replaceChildren(
      el(
        "div",
        { className: "empty" },
        el("h2", {}, "Ask the engine something"),
        el("p", {}, "Answers stream as they are made. What runs inside is under ", el("a", { href: "#live" }, "Live"), "."),
      ),
    );
    this.prompt.focus();
  }

  /** The composer grows with its text, up to what the style sheet allows. */
  private fit(): void {
    this.prompt.style.height = "auto";
    this.prompt.style.height = `${this.prompt.scrollHeight + 2}px`;
  }

  private async ask(): Promise<void> {
    const text = this.prompt.value.trim();
    if (!text || this.running) return;
    for (const old of this.turns.querySelectorAll(":scope > .failure")) old.remove();
    let fields: Record<string, unknown>;
    try {
      fields = this.settings.fields();
    } catch (error) {
      this.turns.append(failure((error as Error).message));
      return;
    }
    this.turns.querySelector(".empty")?.remove();
    this.prompt.value = "";
    this.fit();
    this.history.push({ role: "user", content: text });
    this.turns.append(el("article", { className: "turn user", "aria-label": "You" }, el("div", { className: "prose" }, text)));
    await this.answer(fields);
  }

  private async answer(fields: Record<string, unknown>): Promise<void> {
    const answer = new Answer(this.settings.json);
    this.turns.append(answer.root);
    this.running = new AbortController();
    this.setRunning(true);
    const system = this.settings.systemPrompt;
    const messages = [...(system ? [{ role: "system", content: system }] : []), ...this.history];
    try {
      const body = { ...fields, messages, stream: true, stream_options: { include_usage: true } };
      for await (const event of streamChat(body, this.running.signal)) {
        // Whoever reads further up is left there.
        const atEnd = this.turns.scrollHeight - this.turns.scrollTop - this.turns.clientHeight < 80;
        if (event.usage) answer.usage = event.usage;
        const choice = event.choices[0];
        if (choice) answer.add(choice.delta.content ?? "", choice.delta.reasoning_content ?? "", choice.finish_reason);
        if (atEnd) this.turns.scrollTop = this.turns.scrollHeight;
      }
      answer.end();
    } catch (error) {
      if (this.running.signal.aborted) answer.end("stopped");
      else answer.fail(error instanceof ApiFailure ? error.message : "the server does not answer");
    }
    if (answer.text) this.history.push({ role: "assistant", content: answer.text });
    else this.history.pop(); // roles must alternate for many chat templates
    this.turns.scrollTop = this.turns.scrollHeight;
    this.running = null;
    this.setRunning(false);
    this.prompt.focus();
  }

  private setRunning(running: boolean): void {
    this.send.hidden = running;
    this.stop.hidden = !running;
    this.turns.setAttribute("aria-busy", String(running));
  }
}

class Answer {
  readonly root: HTMLElement;
  text = "";
  private thought = "";
  usage: Usage | null = null;
  private readonly body = el("div", { className: "answer" }, el("span", { className: "caret", "aria-label": "thinking" }));
  /** What a model says to itself: open until it answers. */
  private readonly thinking = el("details", {}, el("summary", {}, "Reasoning"), el("div", { className: "prose" }));
  private readonly foot = el("footer", {});
  private readonly began = performance.now();
  private first = 0;
  private last = 0;
  private reason = "";
  private drawing = 0;

  constructor(private readonly json: boolean) {
    this.root = el("article", { className: "turn assistant", "aria-label": "Answer" }, this.body, this.foot);
  }

  add(text: string, thought: string, reason: string | null): void {
    if (text || thought) {
      this.last = performance.now();
      this.first ||= this.last;
      this.text += text;
      this.thought += thought;
      // Drawn once a frame, however many tokens come.
      this.drawing ||= requestAnimationFrame(() => this.draw(true));
    }
    if (reason) this.reason = reason;
  }

  end(reason = this.reason): void {
    this.draw(false);
    const decode = (this.last - this.first) / 1e3;
    const tokens = this.usage?.completion_tokens ?? 0;
    const cached = this.usage?.prompt_tokens_details?.cached_tokens;
    this.foot.append(
      ...[
        this.first ? `first token after ${milliseconds((this.first - this.began) / 1e3)}` : "",
        tokens > 1 && decode > 0 ? `${short((tokens - 1) / decode)} tokens/s` : "",
        tokens ? `${count(tokens)} tokens` : "",
        this.usage ? `${count(this.usage.prompt_tokens)} in the prompt${cached ? `, ${count(cached)} from the cache` : ""}` : "",
        { length: "cut at the longest answer", stopped: "stopped" }[reason] ?? "",
      ]
        .filter(Boolean)
        .map((text) => el("span", {}, text)),
      copyButton(() => this.text),
    );
  }

  fail(message: string): void {
    this.draw(false);
    this.root.append(failure(message));
  }

  private draw(streaming: boolean): void {
    cancelAnimationFrame(this.drawing);
    this.drawing = 0;
    const shown = this.json && this.text ? renderAnswer(`\`\`\`json\n${this.pretty()}`) : renderAnswer(this.text);
    if (this.thought) {
      this.thinking.open = !this.text && streaming;
      this.thinking.lastElementChild!.textContent = this.thought.trim();
      shown.unshift(this.thinking);
    }
    this.body.replaceChildren(...shown);
    if (streaming) this.body.append(el("span", { className: "caret", "aria-hidden": "true" }));
  }

  /** JSON with indents once it is whole. */
  private pretty(): string {
    try {
      return JSON.stringify(JSON.parse(this.text), null, 2);
    } catch {
      return this.text;
    }
  }
}

function failure(message: string): HTMLElement {
  return el("p", { className: "failure", role: "alert" }, message);
}
