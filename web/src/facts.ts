// What the engine is, and which kernels its passes go through.

import type { Stats } from "./api";
import { el } from "./dom";
import { bytes, count, duration, percent } from "./format";

let shown = "";

export function drawFacts(root: HTMLElement, stats: Stats): void {
  const tables = [facts(stats), paths(stats)];
  // Drawn again only when something changed, so that text can be selected.
  const key = JSON.stringify(tables);
  if (key === shown) return;
  shown = key;
  root.replaceChildren(card("Engine", list(tables[0]!)), card("Paths", list(tables[1]!)), card("Kernels of one pass", kernels(stats)));
}

type Rows = [string, string][];

function facts(stats: Stats): Rows {
  const finished = Object.entries(stats.requests_finished).filter(([, n]) => n);
  return [
    ["Model", stats.model],
    ["Device", stats.device ?? "–"],
    ["Limits", `${count(stats.max_batch_size)} requests, ${count(stats.max_num_tokens)} tokens a step, ${count(stats.max_seq_len)} a request`],
    ["Memory", [["weights", stats.weights_bytes], ["KV cache", stats.kv_bytes], ["activations", stats.arena_bytes]]
      .filter(([, size]) => size)
      .map(([name, size]) => `${name} ${bytes(size as number)}`)
      .join(", ")],
    ["Requests", `${count(stats.requests_submitted)} taken${finished.map(([why, n]) => `, ${count(n)} ${why}`).join("")}`],
    ["Up", duration(Math.floor(stats.uptime_s / 10) * 10)],
    ["castiron", stats.version],
  ].filter(([, value]) => value) as Rows;
}

function paths(stats: Stats): Rows {
  const rows: Rows = [["Steps", count(stats.steps)]];
  if (stats.cuda) {
    rows.push(["Replayed CUDA graphs", percent(stats.graph_steps, stats.steps)]);
    rows.push(["Tokens chosen on the device", percent(stats.device_sampled_steps, stats.steps)]);
    rows.push(["Started ahead", percent(stats.ahead_steps, stats.steps)]);
  } else {
    rows.push(["Instructions", `${stats.isa ?? "?"}, ${stats.num_threads === 1 ? "1 thread" : `${stats.num_threads ?? "?"} threads`}`]);
  }
  rows.push(
    ["Prompt tokens from the cache", percent(stats.prefix_cached_tokens, stats.prefix_query_tokens)],
    ["Cached blocks given up", count(stats.kv_blocks_evicted)],
    ["Requests set back", count(stats.preemptions)],
  );
  if (stats.draft_tokens) rows.push(["Guesses that were right", percent(stats.accepted_tokens, stats.draft_tokens)]);
  return rows;
}

function kernels(stats: Stats): HTMLElement {
  const found = Object.entries(stats.kernels).sort(([, a], [, b]) => b - a);
  const most = found[0]?.[1] ?? 1;
  return el(
    "ol",
    { className: "kernels" },
    ...found.map(([name, times]) =>
      el(
        "li",
        {},
        el("code", {}, name),
        el("meter", { max: most, value: times, "aria-hidden": "true" }),
        el("b", {}, `×${times}`),
      ),
    ),
  );
}

function list(rows: Rows): HTMLElement {
  return el("dl", {}, ...rows.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

function card(title: string, body: HTMLElement): HTMLElement {
  return el("div", { className: "card" }, el("h2", {}, title), body);
}
