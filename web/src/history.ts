// What the charts show: values over time from the differences between answers of /stats, and the last steps.

import type { StepRecord, Stats } from "./api";

/** One interval between two answers. */
export interface Moment {
  /** Milliseconds, of performance.now(). */
  at: number;
  generated: number;
  prompt: number;
  cached: number;
  hits: number;
  looked: number;
  running: number;
  waiting: number;
  /** Of the KV cache, tokens. */
  used: number;
  evictable: number;
  free: number;
}

export const SHOWN_SECONDS = 120;
export const SHOWN_STEPS = 120;
/** Rates are means over so long: a step may be longer than the time between two answers. */
const RATE_SECONDS = 2;

export type Rate = "generated" | "prompt" | "cached";

export class History {
  moments: Moment[] = [];
  steps: StepRecord[] = [];
  private before: { at: number; stats: Stats } | null = null;

  /** Take an answer that came at ``at``. */
  add(stats: Stats, at: number): void {
    const before = this.before;
    this.before = { at, stats };
    if (before && stats.steps < before.stats.steps) {
      this.moments = []; // the server was started again
      this.steps = [];
      return;
    }
    this.steps = [...this.steps, ...stats.recent_steps].slice(-SHOWN_STEPS);
    if (!before) return;
    const seconds = (at - before.at) / 1e3;
    const sum = (key: "prefill_tokens" | "cached_tokens") => stats.recent_steps.reduce((all, step) => all + step[key], 0);
    this.moments.push({
      at,
      generated: (stats.generated_tokens - before.stats.generated_tokens) / seconds,
      prompt: sum("prefill_tokens") / seconds,
      cached: sum("cached_tokens") / seconds,
      hits: stats.prefix_cached_tokens - before.stats.prefix_cached_tokens,
      looked: stats.prefix_query_tokens - before.stats.prefix_query_tokens,
      running: stats.running,
      waiting: stats.waiting,
      used: stats.kv_blocks_used * stats.kv_block_tokens,
      evictable: stats.kv_blocks_cached * stats.kv_block_tokens,
      free: stats.kv_blocks_free * stats.kv_block_tokens,
    });
    this.moments = this.moments.filter((moment) => at - moment.at <= SHOWN_SECONDS * 1e3);
  }

  /** The server did not answer: the next answer is no neighbour of the last. */
  gap(): void {
    this.before = null;
  }

  /** A rate at each moment: the mean over the latest seconds. */
  rates(key: Rate): number[] {
    let [first, sum] = [0, 0];
    return this.moments.map((moment, i) => {
      sum += moment[key];
      while (moment.at - this.moments[first]!.at >= RATE_SECONDS * 1e3) sum -= this.moments[first++]![key];
      return Math.max(0, sum / (i - first + 1));
    });
  }

  /** [found, looked for] tokens of prompts within what is shown. */
  prefixHits(): [number, number] {
    return [this.moments.reduce((all, m) => all + m.hits, 0), this.moments.reduce((all, m) => all + m.looked, 0)];
  }
}

/** Seconds that a step took, without the time it waited for the one before. */
export function stepSeconds(step: StepRecord): number {
  return step.intake_s + step.schedule_s + step.draft_s + step.forward_s + step.sample_s;
}

export function median(values: number[]): number {
  const ordered = [...values].sort((a, b) => a - b);
  const middle = ordered.length >> 1;
  return ordered.length % 2 ? ordered[middle]! : (ordered[middle - 1]! + ordered[middle]!) / 2;
}
