"""The core's step records as a Chrome trace: https://ui.perfetto.dev or chrome://tracing shows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: What a step is made of, in order: the record's field of its length in seconds, and who is at it. Nobody is
#: at a step that was started ahead while it waits behind the one before.
_STEPS, _ENGINE, _DEVICE = 1, 2, 3
_PHASES = {
    "take in": ("intake_s", _ENGINE),
    "schedule": ("schedule_s", _ENGINE),
    "draft": ("draft_s", _ENGINE),
    "queued": ("queued_s", None),
    "device": ("forward_s", _DEVICE),
    "sample": ("sample_s", _ENGINE),
}
_COUNTERS = (
    ("requests", ("running", "waiting")),
    ("KV blocks", ("kv_blocks_used", "kv_blocks_cached")),
    ("tokens", ("decode_tokens", "prefill_tokens", "cached_tokens")),
    ("drafts", ("draft_tokens", "accepted_tokens")),
)


def chrome_trace(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Trace events of the steps in ``core.stats(n)["recent_steps"]``.

    One row shows the steps, from their turn on the device on, with what they were made of; one what the
    engine thread does and one the device; counters show requests, KV blocks and tokens. Times are
    microseconds since the engine was made.
    """
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": name}}
        for tid, name in ((_STEPS, "steps"), (_ENGINE, "engine thread"), (_DEVICE, "device"))
    ]
    for record in records:
        begin = at = record["start_s"] * 1e6
        for name, (field, tid) in _PHASES.items():
            length = record[field] * 1e6
            if tid is None:
                begin = at + length if record["ahead"] else begin
            else:
                events.append({"ph": "X", "pid": 1, "tid": tid, "name": name, "ts": at, "dur": length})
            at += length
        made_of = {key: value for key, value in record.items() if not key.endswith("_s")}
        name = f"step {record['step']}"
        events.append(
            {
                "ph": "X",
                "pid": 1,
                "tid": _STEPS,
                "name": name,
                "ts": begin,
                "dur": at - begin,
                "args": made_of,
            }
        )
        for name, fields in _COUNTERS:
            values = {field: record[field] for field in fields}
            events.append({"ph": "C", "pid": 1, "name": name, "ts": begin, "args": values})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
