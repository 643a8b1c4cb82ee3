// The server's API, as far as the page uses it. Paths are relative, so that the page works below a proxy's prefix.

export interface StepRecord {
  step: number;
  start_s: number;
  prefill_tokens: number;
  decode_tokens: number;
  draft_tokens: number;
  accepted_tokens: number;
  cached_tokens: number;
  queried_tokens: number;
  preemptions: number;
  running: number;
  waiting: number;
  intake_s: number;
  schedule_s: number;
  draft_s: number;
  queued_s: number;
  forward_s: number;
  sample_s: number;
}

export interface Stats {
  model: string;
  version: string;
  device: string | null;
  draining: boolean;
  uptime_s: number;
  seconds_since_progress: number;
  kernels: Record<string, number>;
  running: number;
  waiting: number;
  waiting_tokens: number;
  waiting_for: string;
  kv_blocks_total: number;
  kv_blocks_used: number;
  kv_blocks_cached: number;
  kv_blocks_free: number;
  kv_block_tokens: number;
  kv_blocks_evicted: number;
  preemptions: number;
  steps: number;
  graph_steps: number;
  device_sampled_steps: number;
  ahead_steps: number;
  generated_tokens: number;
  draft_tokens: number;
  accepted_tokens: number;
  prefix_query_tokens: number;
  prefix_cached_tokens: number;
  requests_submitted: number;
  requests_finished: Record<string, number>;
  max_batch_size: number;
  max_num_tokens: number;
  max_seq_len: number;
  isa?: string;
  num_threads?: number;
  weights_bytes?: number;
  kv_bytes?: number;
  arena_bytes?: number;
  cuda?: { name: string; compute_capability: number; graphs: number };
  recent_steps: StepRecord[];
}

export interface Usage {
  prompt_tokens: number;
  completion_tokens: number;
  prompt_tokens_details?: { cached_tokens?: number } | null;
}

export interface ChatEvent {
  choices: {
    delta: { content?: string | null; reasoning_content?: string | null };
    finish_reason: string | null;
  }[];
  usage?: Usage | null;
}

export class ApiFailure extends Error {
  constructor(
    message: string,
    readonly status: number,
  ) {
    super(message);
  }
}

const KEY = "castiron.key";

export function apiKey(): string {
  return sessionStorage.getItem(KEY) ?? "";
}

/** Kept for this tab alone. */
export function setApiKey(key: string): void {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

async function ask(path: string, init: RequestInit = {}): Promise<Response> {
  const headers = new Headers(init.headers);
  if (apiKey()) headers.set("Authorization", `Bearer ${apiKey()}`);
  const answer = await fetch(path, { ...init, headers });
  if (answer.ok) return answer;
  let message = `status ${answer.status}`;
  try {
    message = (await answer.json()).error.message ?? message;
  } catch {
    // no envelope: a proxy answered
  }
  throw new ApiFailure(message, answer.status);
}

export async function getJson<T>(path: string): Promise<T> {
  return (await ask(path, { signal: AbortSignal.timeout(10_000) })).json();
}

/** The events of a streamed chat. Throws ApiFailure for an error before or within the stream. */
export async function* streamChat(body: object, signal: AbortSignal): AsyncGenerator<ChatEvent> {
  const answer = await ask("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  const reader = answer.body!.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new ApiFailure("the stream ended before the answer did", answer.status);
    const events = (rest + value).split("\n\n");
    rest = events.pop()!;
    for (const event of events) {
      if (!event.startsWith("data: ")) continue;
      if (event === "data: [DONE]") return;
      const parsed = JSON.parse(event.slice(6));
      if (parsed.error) throw new ApiFailure(parsed.error.message, answer.status);
      yield parsed;
    }
  }
}
