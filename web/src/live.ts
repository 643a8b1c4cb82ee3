// The live view: what the engine does now, the last two minutes, its last steps, and what it is.

import type { StepRecord, Stats } from "./api";
import { Chart, type ChartOptions, type Series } from "./charts";
import { byId, el } from "./dom";
import { drawFacts } from "./facts";
import { count, milliseconds, percent, short } from "./format";
import { History, median, type Moment, type Rate, SHOWN_SECONDS, SHOWN_STEPS, stepSeconds } from "./history";

/** A series of a chart and its values, one for each x. */
type Column = Series & { values: (history: History) => number[] };

const ago = (seconds: number) => (seconds === 0 ? "now" : `${seconds} s`);
const step = (value: number) => (Number.isInteger(value) ? `#${value}` : "");
const perSecond = (value: number) => `${short(value)}/s`;

const seconds = ({ moments }: History) => moments.map((m) => (m.at - moments.at(-1)!.at) / 1e3);
const rate = (key: Rate) => (history: History) => history.rates(key);
const moment = (of: (m: Moment) => number) => (history: History) => history.moments.map(of);

// As many places as the chart has, so that bars do not grow thinner while it fills.
const missing = ({ steps }: History) => SHOWN_STEPS - steps.length;
const places = (history: History) => {
  const [before, first] = [missing(history), history.steps[0]!.step];
  return [...Array.from({ length: before }, (_, i) => first - before + i), ...history.steps.map((s) => s.step)];
};
const bar = (of: (s: StepRecord) => number) => (history: History) => [
  ...Array<number>(missing(history)).fill(0),
  ...history.steps.map(of),
];

// The axis always spans two minutes: time goes by at one speed from the first moment on.
const overTime = (options: Omit<ChartOptions<Column>, "xAxis">) =>
  new Chart({ ...options, xAxis: ago, span: [-SHOWN_SECONDS, 0] });
const overSteps = (options: Omit<ChartOptions<Column>, "xAxis" | "kind">) =>
  new Chart({ ...options, kind: "stacked-bars", xAxis: step });

function draw(charts: Chart<Column>[], x: number[], history: History): void {
  for (const chart of charts) chart.set([x, ...chart.options.series.map(({ values }) => values(history))]);
}

/** What a tile says: its value and a note below. */
const TILES: Record<string, (stats: Stats, history: History) => [string, string]> = {
  Running: (stats) => [count(stats.running), `of ${count(stats.max_batch_size)}`],
  Waiting: (stats) => [count(stats.waiting), stats.waiting ? `${count(stats.waiting_tokens)} tokens` : ""],
  Generated: (_, history) => [perSecond(history.rates("generated").at(-1) ?? 0), "tokens"],
  Prompts: (_, history) => [perSecond(history.rates("prompt").at(-1) ?? 0), "tokens computed"],
  "KV cache in use": ({ kv_blocks_used: used, kv_blocks_total: total, kv_block_tokens: tokens }) => [
    percent(used, total),
    `${short(used * tokens)} of ${short(total * tokens)} tokens`,
  ],
  "Prefix hits": (_, history) => {
    const [found, looked] = history.prefixHits();
    return [percent(found, looked), looked ? `of ${short(looked)}, 2 min` : "no prompt, 2 min"];
  },
  Step: (_, history) => {
    const lengths = history.steps.map(stepSeconds);
    return lengths.length ? [milliseconds(median(lengths)), `median of ${lengths.length}`] : ["–", ""];
  },
  Finished: (stats) => {
    const { stop = 0, length = 0, cancelled = 0, error = 0 } = stats.requests_finished;
    const others = [error ? `${count(error)} failed` : "", cancelled ? `${count(cancelled)} cancelled` : ""];
    return [count(stop + length), others.filter(Boolean).join(", ") || "none failed"];
  },
};

export class Live {
  private readonly history = new History();
  private stats: Stats | null = null;
  private readonly overTime = [
    overTime({
      title: "Generated tokens",
      kind: "line",
      series: [{ label: "per second", color: "ember", values: rate("generated") }],
      format: short,
      atLeast: 10,
    }),
    overTime({
      title: "Requests",
      kind: "line",
      series: [
        { label: "running", color: "ember", values: moment((m) => m.running) },
        { label: "waiting", color: "plum", values: moment((m) => m.waiting) },
      ],
      format: count,
      atLeast: 4,
    }),
    overTime({
      title: "Prompt tokens per second",
      kind: "stacked-area",
      series: [
        { label: "computed", color: "steel", values: rate("prompt") },
        { label: "from the cache", color: "leaf", values: rate("cached") },
      ],
      format: short,
      atLeast: 10,
    }),
    overTime({
      title: "KV cache, tokens",
      kind: "stacked-area",
      series: [
        { label: "used", color: "ember", values: moment((m) => m.used) },
        { label: "evictable", color: "leaf", values: moment((m) => m.evictable) },
        { label: "free", color: "faint", values: moment((m) => m.free) },
      ],
      format: short,
    }),
  ];
  private readonly overSteps = [
    overSteps({
      title: "Batch of each step, tokens",
      series: [
        { label: "decode", color: "ember", values: bar((s) => s.decode_tokens) },
        { label: "guesses", color: "plum", values: bar((s) => s.draft_tokens) },
        { label: "prefill", color: "steel", values: bar((s) => s.prefill_tokens) },
      ],
      format: count,
      atLeast: 4,
    }),
    overSteps({
      title: "Time of each step, ms",
      series: [
        { label: "device", color: "ember", values: bar((s) => s.forward_s * 1e3) },
        { label: "sample", color: "steel", values: bar((s) => s.sample_s * 1e3) },
        { label: "schedule", color: "leaf", values: bar((s) => (s.intake_s + s.schedule_s) * 1e3) },
        { label: "guess", color: "plum", values: bar((s) => s.draft_s * 1e3) },
      ],
      format: short,
    }),
  ];
  private readonly charts = [...this.overTime, ...this.overSteps];
  private readonly tiles = Object.entries(TILES).map(([name, says]) => {
    const [value, note] = [el("b", {}, "–"), el("small", {})];
    byId("tiles").append(el("div", { className: "tile" }, el("span", {}, name), value, note));
    return { value, note, says };
  });

  constructor() {
    byId("charts").append(...this.charts.map((chart) => chart.root));
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
    for (const chart of this.charts) chart.redraw();
  }

  private draw(): void {
    const { stats, history } = this;
    if (!stats) return;
    for (const { value, note, says } of this.tiles) [value.textContent, note.textContent] = says(stats, history);
    if (history.moments.length) draw(this.overTime, seconds(history), history);
    if (history.steps.length) draw(this.overSteps, places(history), history);
    drawFacts(byId("facts"), stats);
  }
}
