"""The core's step records as a Chrome trace: https://ui.perfetto.dev or chrome://tracing shows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: Phases of a step in their order, by the record's field of their length in seconds.
_PHASES = {
    "take in": "intake_s",
    "schedule": "schedule_s",
    "draft": "draft_s",
    "device": "forward_s",
    "sample": "sample_s",
}
_COUNTERS = (
    ("requests", ("running", "waiting")),
    ("KV blocks", ("kv_blocks_used", "kv_blocks_cached")),
    ("tokens", ("decode_tokens", "prefill_tokens", "cached_tokens")),
    ("drafts", ("draft_tokens", "accepted_tokens")),
)


def chrome_trace(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Trace events of the steps in ``core.stats(n)["recent_steps"]``.

    One row shows the steps with what they were made of, one their phases; counters show requests, KV blocks
    and tokens. Times are microseconds since the engine was made.
    """
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": name}}
        for tid, name in ((1, "steps"), (2, "phases"))
    ]
    for record in records:
        begin = at = record["start_s"] * 1e6
        for name, field in _PHASES.items():
            length = record[field] * 1e6
            events.append({"ph": "X", "pid": 1, "tid": 2, "name": name, "ts": at, "dur": length})
            at += length
        made_of = {key: value for key, value in record.items() if not key.endswith("_s")}
        name = f"step {record['step']}"
        events.append(
            {"ph": "X", "pid": 1, "tid": 1, "name": name, "ts": begin, "dur": at - begin, "args": made_of}
        )
        for name, fields in _COUNTERS:
            values = {field: record[field] for field in fields}
            events.append({"ph": "C", "pid": 1, "name": name, "ts": begin, "args": values})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
