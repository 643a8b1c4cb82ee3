"""Rotation, writes to the paged KV cache, attention over it, and the choice of rows that want logits."""

from __future__ import annotations

from ..reading import head_attrs
from ..tactic import Context, Lowering, Op, Tactic, WeightUse, bandwidth_cost
from .kernels import host_call

_PAIRS = ("rotary_dim", "interleaved", "concat_halves")
_DIMS = ("q_heads", "kv_heads", "head_dim", "v_head_dim")


def _vectors(*names: str) -> list[WeightUse]:
    return [WeightUse((name,), "vector") for name in names]


def _two_dimensional(op: Op, context: Context) -> bool:
    return len(op.required(0).shape) == 2


def _rope(op: Op, context: Context) -> Lowering:
    x, positions, cos, sin = (op.required(i) for i in range(4))
    attrs = head_attrs(op, ("heads", "head_dim", *_PAIRS))
    call = host_call(
        "rope", [x.name, positions.name], [op.outputs[0].name], _vectors(cos.name, sin.name), attrs
    )
    return Lowering((call,))


def _rope_write_kv(op: Op, context: Context) -> Lowering:
    q, k, v, positions, cos, sin = (op.required(i) for i in range(6))
    inputs = [q.name, k.name, v.name, positions.name]
    attrs = head_attrs(op, ("layer", *_DIMS, *_PAIRS))
    return Lowering(
        (host_call("rope_write_kv", inputs, [op.outputs[0].name], _vectors(cos.name, sin.name), attrs),)
    )


def _write_kv(op: Op, context: Context) -> Lowering:
    k, v = op.required(0), op.required(1)
    attrs = head_attrs(op, ("layer", "kv_heads", "head_dim", "v_head_dim"))
    return Lowering((host_call("write_kv", [k.name, v.name], [], (), attrs),))


def _paged_attention(op: Op, context: Context) -> Lowering:
    q, sinks, slopes = op.required(0), op.input(1), op.input(2)
    attrs = head_attrs(op, ("layer", *_DIMS))
    attrs |= {
        "scale": float(op.attrs["scale"]),
        "window": int(op.attrs.get("window", 0)),
        "chunk": int(op.attrs.get("chunk", 0)),
        "softcap": float(op.attrs.get("softcap", 0.0)),
        "has_sinks": sinks is not None,
        "has_slopes": slopes is not None,
    }
    weights = _vectors(*(w.name for w in (sinks, slopes) if w is not None))
    return Lowering((host_call("paged_attention", [q.name], [op.outputs[0].name], weights, attrs),))


def _attention_fits(op: Op, context: Context) -> bool:
    constants = [op.input(i) for i in (1, 2)]
    return _two_dimensional(op, context) and all(c is None or c.constant for c in constants)


def _gather_rows(op: Op, context: Context) -> Lowering:
    x, rows = op.required(0), op.required(1)
    return Lowering((host_call("gather_rows", [x.name, rows.name], [op.outputs[0].name]),))


def _rope_fits(op: Op, context: Context) -> bool:
    return _two_dimensional(op, context) and op.required(2).constant and op.required(3).constant


def _rope_write_fits(op: Op, context: Context) -> bool:
    return _two_dimensional(op, context) and op.required(4).constant and op.required(5).constant


TACTICS = (
    Tactic("host.rope", "castiron.PagedRope", "host", _rope_fits, _rope, bandwidth_cost),
    Tactic(
        "host.rope_write_kv", "castiron.RopeWriteKV", "host", _rope_write_fits, _rope_write_kv, bandwidth_cost
    ),
    Tactic("host.write_kv", "castiron.WriteKV", "host", _two_dimensional, _write_kv, bandwidth_cost),
    Tactic(
        "host.paged_attention",
        "castiron.PagedAttention",
        "host",
        _attention_fits,
        _paged_attention,
        bandwidth_cost,
    ),
    Tactic("host.gather_rows", "castiron.GatherRows", "host", _two_dimensional, _gather_rows, bandwidth_cost),
)
