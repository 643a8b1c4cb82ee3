// Polls /stats while somebody looks.

import { getJson, type Stats } from "./api";

const EVERY_MS = 500;
const AFTER_A_FAILURE_MS = 2000;
/** Of several engines behind one address the one to look at: /?replica=1#live. */
const REPLICA = new URLSearchParams(location.search).get("replica");

export class Feed {
  private last = 0;

  constructor(
    private readonly take: (stats: Stats) => void,
    private readonly failed: (error: unknown) => void,
  ) {}

  start(): void {
    void this.poll();
  }

  private async poll(): Promise<void> {
    let pause = EVERY_MS;
    if (!document.hidden) {
      try {
        const stats = await getJson<Stats>(`stats?recent_steps=1024&after_step=${this.last}&replica=${REPLICA ?? 0}`);
        // A server that was started again counts from the beginning.
        this.last = stats.steps;
        this.take(stats);
      } catch (error) {
        this.last = 0;
        pause = AFTER_A_FAILURE_MS;
        this.failed(error);
      }
    }
    setTimeout(() => void this.poll(), pause);
  }
}
