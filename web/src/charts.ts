// Charts over uPlot: areas and lines over time, stacked bars over steps; a legend that tells values in words.

import uPlot from "uplot";
import { el } from "./dom";
import { tick } from "./format";
import { color } from "./theme";

export interface Series {
  label: string;
  /** A variable of the style sheet. */
  color: string;
}

export interface ChartOptions<S extends Series = Series> {
  title: string;
  series: S[];
  kind: "line" | "stacked-area" | "stacked-bars";
  /** What a value is in the legend. */
  format: (value: number) => string;
  /** What x is, for the axis. */
  xAxis: (value: number) => string;
  /** Top of the y axis at least. */
  atLeast?: number;
  /** Ends of the x axis; without them those of the values. */
  span?: [number, number];
}

type Columns = [number[], ...number[][]];

export class Chart<S extends Series = Series> {
  readonly root: HTMLElement;
  private readonly canvas = el("div", { className: "plot" });
  private readonly values: HTMLElement[] = [];
  private plot: uPlot | null = null;
  private columns: Columns;

  constructor(readonly options: ChartOptions<S>) {
    this.columns = [[], ...options.series.map(() => [])] as Columns;
    const legend = options.series.map(({ label, color: name }) => {
      const value = el("b", {}, "–");
      this.values.push(value);
      return el("li", {}, el("i", { style: `background: var(--${name})`, "aria-hidden": "true" }), el("span", {}, label), value);
    });
    this.root = el(
      "figure",
      { className: "chart" },
      el("figcaption", {}, el("h2", {}, options.title), el("ul", {}, ...legend)),
      this.canvas,
    );
    new ResizeObserver(() => this.resize()).observe(this.canvas);
  }

  /** x, then a column of each series, all of one length. */
  set(columns: Columns): void {
    this.columns = columns;
    if (!this.canvas.clientWidth) return; // not on the screen
    if (this.plot) this.plot.setData(this.drawn(), true);
    else this.make();
    this.tell(null);
  }

  /** Make it again, in the colours of now. */
  redraw(): void {
    this.plot?.destroy();
    this.plot = null;
    this.set(this.columns);
  }

  private resize(): void {
    const width = this.canvas.clientWidth;
    if (!width) return;
    if (this.plot) this.plot.setSize({ width, height: this.canvas.clientHeight });
    else this.make();
  }

  /** Values at an index, or the latest. */
  private tell(at: number | null): void {
    const [x, ...series] = this.columns;
    const index = at ?? x.length - 1;
    series.forEach((column, i) => {
      const value = column[index];
      this.values[i]!.textContent = value === undefined ? "–" : this.options.format(value);
    });
  }

  private drawn(): uPlot.AlignedData {
    const [x, ...series] = this.columns;
    if (this.options.kind === "line") return [x, ...series];
    // Stacks are drawn from the top one down, each over the ones below it.
    const sums: number[][] = [];
    series.forEach((column, i) => sums.push(column.map((value, k) => value + (sums[i - 1]?.[k] ?? 0))));
    return [x, ...sums.reverse()];
  }

  private make(): void {
    const { kind, series, xAxis, atLeast = 0, span } = this.options;
    const line = color("line");
    const axis: uPlot.Axis = {
      stroke: color("muted"),
      font: "11px system-ui, sans-serif",
      grid: { stroke: line, width: 1 },
      ticks: { show: false },
    };
    const ordered = kind === "line" ? series : [...series].reverse();
    this.plot = new uPlot(
      {
        width: this.canvas.clientWidth,
        height: this.canvas.clientHeight,
        padding: [8, 18, 0, 0],
        legend: { show: false },
        cursor: { y: false, drag: { x: false, y: false }, points: { show: kind === "line" } },
        scales: { x: { time: false, ...(span ? { range: () => span } : {}) }, y: { range: (_, __, top) => [0, Math.max(top * 1.08, atLeast, 1e-9)] } },
        axes: [
          { ...axis, grid: { show: false }, size: 22, gap: 2, space: 70, values: (_, ticks) => ticks.map(xAxis) },
          { ...axis, size: 44, gap: 6, space: 34, values: (_, ticks) => ticks.map(tick) },
        ],
        series: [
          {},
          ...ordered.map((one): uPlot.Series => {
            const ink = color(one.color);
            const common = { label: one.label, points: { show: false } };
            if (kind === "line") return { ...common, stroke: ink, width: 2, fill: `${ink}1f` };
            if (kind === "stacked-area") return { ...common, stroke: ink, width: 1, fill: ink };
            // A gap of a hair between bars only where they are wide enough to have one.
            return { ...common, stroke: ink, width: 0, fill: ink, paths: uPlot.paths.bars!({ size: [0.7, 40] }) };
          }),
        ],
        hooks: { setCursor: [(plot) => this.tell(plot.cursor.left! < 0 ? null : (plot.cursor.idx ?? null))] },
      },
      this.drawn(),
      this.canvas,
    );
  }
}
