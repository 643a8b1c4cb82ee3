// The live view: what the engine does now, the last two minutes, its last steps, and what it is.

import type { Stats } from "./api";
import { Chart } from "./charts";
import { byId, el } from "./dom";
import { drawFacts } from "./facts";
import { count, milliseconds, percent, short } from "./format";
import { History, median, SHOWN_SECONDS, SHOWN_STEPS, stepSeconds } from "./history";

const ago = (seconds: number) => (seconds === 0 ? "now" : `${seconds} s`);
const step = (value: number) => (Number.isInteger(value) ? `#${value}` : "");
// The axis always spans two minutes: time goes by at one speed from the first moment on.
const TWO_MINUTES: [number, number] = [-SHOWN_SECONDS, 0];
const rate = (value: number) => `${short(value)}/s`;

export class Live {
  private readonly history = new History();
  private stats: Stats | null = null;
  private readonly generated = new Chart({
    title: "Generated tokens",
    kind: "line",
    series: [{ label: "per second", color: "ember" }],
    format: short,
    xAxis: ago,
    span: TWO_MINUTES,
    atLeast: 10,
  });
  private readonly prompts = new Chart({
    title: "Prompt tokens per second",
    kind: "stacked-area",
    series: [
      { label: "computed", color: "steel" },
      { label: "from the cache", color: "leaf" },
    ],
    format: short,
    xAxis: ago,
    span: TWO_MINUTES,
    atLeast: 10,
  });
  private readonly requests = new Chart({
    title: "Requests",
    kind: "line",
    series: [
      { label: "running", color: "ember" },
      { label: "waiting", color: "plum" },
    ],
    format: count,
    xAxis: ago,
    span: TWO_MINUTES,
    atLeast: 4,
  });
  private readonly pool = new Chart({
    title: "KV cache, tokens",
    kind: "stacked-area",
    series: [
      { label: "used", color: "ember" },
      { label: "evictable", color: "leaf" },
      { label: "free", color: "faint" },
    ],
    format: short,
    xAxis: ago,
    span: TWO_MINUTES,
  });
  private readonly batch = new Chart({
    title: "Batch of each step, tokens",
    kind: "stacked-bars",
    series: [
      { label: "decode", color: "ember" },
      { label: "guesses", color: "plum" },
      { label: "prefill", color: "steel" },
    ],
    format: count,
    xAxis: step,
    atLeast: 4,
  });
  private readonly time = new Chart({
    title: "Time of each step, ms",
    kind: "stacked-bars",
    series: [
      { label: "device", color: "ember" },
      { label: "sample", color: "steel" },
      { label: "schedule", color: "leaf" },
      { label: "guess", color: "plum" },
    ],
    format: short,
    xAxis: step,
  });
  private readonly all = [this.generated, this.requests, this.prompts, this.pool, this.batch, this.time];
  private readonly tiles = new Map<string, [HTMLElement, HTMLElement]>();

  constructor() {
    byId("charts").append(...this.all.map((chart) => chart.root));
    for (const name of ["Running", "Waiting", "Generated", "Prompts", "KV cache in use", "Prefix hits", "Step", "Finished"]) {
      const [value, note] = [el("b", {}, "–"), el("small", {})];
      this.tiles.set(name, [value, note]);
      byId("tiles").append(el("div", { className: "tile" }, el("span", {}, name), value, note));
    }
  }

  take(stats: Stats): void {
    this.stats = stats;
    this.history.add(stats, performance.now());
    if (!byId("view-live").hidden) this.draw();
  }

  lost(): void {
    this.history.gap();
  }

  shown(): void {
    this.draw();
  }

  redraw(): void {
    for (const chart of this.all) chart.redraw();
  }

  private tile(name: string, value: string, note = ""): void {
    const [shownValue, shownNote] = this.tiles.get(name)!;
    shownValue.textContent = value;
    shownNote.textContent = note;
  }

  private draw(): void {
    const stats = this.stats;
    if (!stats) return;
    const { history } = this;
    const tokens = stats.kv_block_tokens;
    const [found, looked] = history.prefixHits();
    const lengths = history.steps.map(stepSeconds);
    this.tile("Running", count(stats.running), `of ${count(stats.max_batch_size)}`);
    this.tile("Waiting", count(stats.waiting), stats.waiting ? `${count(stats.waiting_tokens)} tokens` : "");
    this.tile("Generated", rate(history.rates("generated").at(-1) ?? 0), "tokens");
    this.tile("Prompts", rate(history.rates("prompt").at(-1) ?? 0), "tokens computed");
    this.tile(
      "KV cache in use",
      percent(stats.kv_blocks_used, stats.kv_blocks_total),
      `${short(stats.kv_blocks_used * tokens)} of ${short(stats.kv_blocks_total * tokens)} tokens`,
    );
    this.tile("Prefix hits", percent(found, looked), looked ? `of ${short(looked)}, 2 min` : "no prompt, 2 min");
    this.tile(
      "Step",
      lengths.length ? milliseconds(median(lengths)) : "–",
      lengths.length ? `median of ${lengths.length}` : "",
    );

    const { stop = 0, length = 0, cancelled = 0, error = 0 } = stats.requests_finished;
    this.tile(
      "Finished",
      count(stop + length),
      [error ? `${count(error)} failed` : "", cancelled ? `${count(cancelled)} cancelled` : ""].filter(Boolean).join(", ") || "none failed",
    );

    const { moments, steps } = history;
    const now = moments.at(-1)?.at ?? 0;
    const x = moments.map((m) => (m.at - now) / 1e3);
    const column = (value: (m: (typeof moments)[number]) => number) => moments.map(value);
    if (moments.length) {
      this.generated.set([x, history.rates("generated")]);
      this.prompts.set([x, history.rates("prompt"), history.rates("cached")]);
      this.requests.set([x, column((m) => m.running), column((m) => m.waiting)]);
      this.pool.set([
        x,
        column((m) => m.used * tokens),
        column((m) => m.evictable * tokens),
        column((m) => m.free * tokens),
      ]);
    }
    if (steps.length) {
      // As many places as the chart has, so that bars do not grow thinner while it fills.
      const missing = Math.max(0, SHOWN_STEPS - steps.length);
      const first = steps[0]!.step;
      const places = [...Array.from({ length: missing }, (_, i) => first - missing + i), ...steps.map((s) => s.step)];
      const bars = (value: (s: (typeof steps)[number]) => number) => [...Array<number>(missing).fill(0), ...steps.map(value)];
      this.batch.set([
        places,
        bars((s) => s.decode_tokens),
        bars((s) => s.draft_tokens),
        bars((s) => s.prefill_tokens),
      ]);
      this.time.set([
        places,
        bars((s) => s.forward_s * 1e3),
        bars((s) => s.sample_s * 1e3),
        bars((s) => (s.intake_s + s.schedule_s) * 1e3),
        bars((s) => s.draft_s * 1e3),
      ]);
    }
    drawFacts(byId("facts"), stats);
  }
}
