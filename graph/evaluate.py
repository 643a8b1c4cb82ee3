"""Evaluating a graph in numpy, before or after the passes, one sequence at a time.

onnx's reference evaluator runs the standard ops; the castiron ops are added here. Keys and values are kept
from one run to the next, so that a prompt can be run in pieces and decoded token by token, as an engine does
it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from . import numpy_ops as math
from . import ops
from .custom import CustomOp
from .fake_quant import fake_quantize
from .numpy_ops import Array
from .weights.exprs import pick_rows
from .weights.quantized import dequantize, quantize
from .weights.unpack import unpack


class _Cache:
    """Keys and values by layer, of the one sequence that is evaluated: [heads, tokens, width]."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Array, Array, Array]] = {}
        self.positions: Array = np.zeros(0, np.int64)

    def append(self, layer: int, k: Array, v: Array) -> None:
        parts = [(k, v, self.positions)]
        if layer in self.layers:
            parts.insert(0, self.layers[layer])
        keys, values, positions = zip(*parts, strict=True)
        self.layers[layer] = (np.concatenate(keys, 1), np.concatenate(values, 1), np.concatenate(positions))

    def attend(self, q: Array, layer: int, **options: Any) -> Array:
        k, v, positions = self.layers[layer]
        return math.attention(q, k, v, self.positions, positions, **options)


class GraphEvaluator:
    """Runs a graph of docs/graph.md on numpy arrays.

    ``weights`` overrides initializers by name (and supplies those whose file does not exist). Weights are
    read when the evaluator is made. ``custom``: the plugins' ops that occur.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        weights: Mapping[str, Array] | None = None,
        custom: Iterable[CustomOp] = (),
    ) -> None:
        given = dict(weights or {})
        stripped = onnx.ModelProto()
        stripped.CopyFrom(model)
        kept = []
        self._weights: dict[str, Array] = {}
        for tensor in stripped.graph.initializer:
            if tensor.name in given or tensor.data_location == TensorProto.EXTERNAL:
                array = given[tensor.name] if tensor.name in given else read_external(tensor)
                self._weights[tensor.name] = array
                stripped.graph.input.append(
                    helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
                )
            else:
                kept.append(tensor)
        del stripped.graph.initializer[:]
        stripped.graph.initializer.extend(kept)
        self._cache = _Cache()
        self._evaluator = ReferenceEvaluator(
            stripped, new_ops=[*_operators(self._cache), *map(_custom_operator, custom)]
        )

    def reset(self) -> None:
        """Forgets the sequence."""
        self._cache.layers.clear()

    def run(self, token_ids: Any, positions: Any = None, logit_rows: Any = None) -> Array:
        """Logits [N, vocab] of the next tokens of the sequence.

        ``positions`` continue the sequence by default; ``logit_rows`` are all rows by default.
        """
        tokens = np.asarray(token_ids, np.int64)
        if positions is None:
            held = next(iter(self._cache.layers.values()), None)
            start = 0 if held is None else int(held[2][-1]) + 1
            positions = np.arange(start, start + len(tokens))
        rows = np.arange(len(tokens)) if logit_rows is None else np.asarray(logit_rows)
        self._cache.positions = np.asarray(positions, np.int64)
        feeds = {
            ops.TOKEN_IDS: tokens,
            ops.POSITIONS: self._cache.positions,
            ops.LOGIT_ROWS: rows.astype(np.int64),
            **self._weights,
        }
        outputs: Any = self._evaluator.run([ops.LOGITS], feeds)
        logits: Array = outputs[0]
        return logits


def read_external(tensor: TensorProto) -> Array:
    """The array of an initializer that refers to a file by absolute path, offset and length."""
    place = {entry.key: entry.value for entry in tensor.external_data}
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type))
    if tensor.data_type == TensorProto.BFLOAT16:
        dtype = np.dtype(ml_dtypes.bfloat16)
    with open(place["location"], "rb") as file:
        file.seek(int(place.get("offset", 0)))
        data = file.read(int(place["length"]))
    return np.frombuffer(data, dtype).reshape(tuple(tensor.dims))


def _heads(x: Array, heads: int) -> Array:
    """[T, H·D] -> [H, T, D]."""
    return x.reshape(len(x), heads, -1).transpose(1, 0, 2)


def _rows(x: Array) -> Array:
    """[H, T, D] -> [T, H·D]."""
    return x.transpose(1, 0, 2).reshape(x.shape[1], -1)


def _dequantize(codes: Array, *scales: Array, source: str = "", **format: Any) -> Array:
    """``source`` names the matrix that the codes stand for, which changes no number."""
    return dequantize(codes, *scales, **format)


def _stored(x: Array, kv_format: str, scales: Sequence[float]) -> Array:
    """Keys or values [heads, T, D] as the cache gives them back; ``scales`` one a head, none: 1."""
    if not kv_format:
        return x
    by_head = np.asarray(scales or [1.0] * len(x), np.float32)[:, None, None]
    return fake_quantize(x / by_head, kv_format, x_scale=1.0) * by_head


def _operators(cache: _Cache) -> list[type[OpRun]]:
    """An OpRun class per op and stage, bound to one evaluator's cache."""

    def _rms_norm(
        x: Array, w: Array | None = None, *, eps: float, one_plus: int = 0, group: int = 0
    ) -> Array:
        return math.norm(x, w, None, eps, centered=False, group=group, one_plus=bool(one_plus))

    def _layer_norm(
        x: Array,
        w: Array | None = None,
        b: Array | None = None,
        *,
        eps: float,
        group: int = 0,
        one_plus: int = 0,
    ) -> Array:
        return math.norm(x, w, b, eps, centered=True, group=group, one_plus=bool(one_plus))

    def _add_rms_norm(
        x: Array, residual: Array, w: Array | None = None, *, eps: float, one_plus: int = 0
    ) -> tuple[Array, Array]:
        total = math.f32(x + residual)
        return _rms_norm(total, w, eps=eps, one_plus=one_plus), total

    def _add_layer_norm(
        x: Array,
        residual: Array,
        w: Array | None = None,
        b: Array | None = None,
        *,
        eps: float,
        one_plus: int = 0,
    ) -> tuple[Array, Array]:
        total = math.f32(x + residual)
        return _layer_norm(total, w, b, eps=eps, one_plus=one_plus), total

    def _linear(
        x: Array,
        w: Array,
        b: Array | None = None,
        residual: Array | None = None,
        *,
        activation: str = "none",
        alpha: float = 1.0,
        **rounding: Any,
    ) -> Array:
        return math.linear(fake_quantize(x, **rounding), w, b, residual, activation, alpha)

    def _gated_linear(
        x: Array,
        w_gate: Array,
        w_up: Array,
        b_gate: Array | None = None,
        b_up: Array | None = None,
        *,
        activation: str,
        **rounding: Any,
    ) -> Array:
        x = fake_quantize(x, **rounding)
        return math.gated_linear(x, w_gate, w_up, b_gate, b_up, activation)

    def _expert_linear(
        x: Array,
        expert_ids: Array,
        w: Array,
        b: Array | None = None,
        *,
        experts: int,
        source: str = "",
        **rounding: Any,
    ) -> Array:
        return math.expert_linear(fake_quantize(x, **rounding), expert_ids, w, b, experts)

    def _expert_gated_linear(
        x: Array,
        expert_ids: Array,
        w_gate: Array,
        w_up: Array,
        b_gate: Array | None = None,
        b_up: Array | None = None,
        *,
        experts: int,
        activation: str,
        **rounding: Any,
    ) -> Array:
        x = fake_quantize(x, **rounding)
        gate = math.expert_linear(x, expert_ids, w_gate, b_gate, experts)
        return math.activation(gate, activation) * math.expert_linear(x, expert_ids, w_up, b_up, experts)

    def _activation(x: Array, *, fn: str) -> Array:
        return math.activation(x, fn)

    def _embedding(ids: Array, table: Array, *, scale: float = 1.0, index_offset: int = 0) -> Array:
        return math.f32(table[ids + index_offset]) * np.float32(scale)

    def _gather_rows(x: Array, rows: Array) -> Array:
        return x[rows]

    def _rope(x: Array, cos: Array, sin: Array, *, style: str, cos_layout: str) -> Array:
        cos, sin = math.half_table(cos, cos_layout)[:, None], math.half_table(sin, cos_layout)[:, None]
        return math.rope(x, cos, sin, style)

    def _attention(
        q: Array,
        k: Array,
        v: Array,
        sinks: Array | None = None,
        slopes: Array | None = None,
        *,
        layer: int,
        scale: float,
        window: int = 0,
        chunk: int = 0,
        softcap: float = 0.0,
    ) -> Array:
        cache.append(layer, k[0], v[0])
        options = {"scale": scale, "window": window, "chunk": chunk, "softcap": softcap}
        return cache.attend(q[0], layer, sinks=sinks, slopes=slopes, **options)[None]

    def _paged_rope(
        x: Array,
        positions: Array,
        cos: Array,
        sin: Array,
        *,
        heads: int,
        head_dim: int,
        rotary_dim: int,
        interleaved: int = 0,
        concat_halves: int = 0,
    ) -> Array:
        style = "interleaved" if interleaved else "half"
        style = "concat_halves" if concat_halves else style
        table = (math.f32(cos)[positions], math.f32(sin)[positions])
        return _rows(math.rope(_heads(x, heads), *table, style))

    def _rope_write_kv(
        q: Array,
        k: Array,
        v: Array,
        positions: Array,
        cos: Array,
        sin: Array,
        *,
        layer: int,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        v_head_dim: int,
        kv_format: str = "",
        k_scale: Sequence[float] = (),
        v_scale: Sequence[float] = (),
        **pairs: int,
    ) -> Array:
        k = _paged_rope(k, positions, cos, sin, heads=kv_heads, head_dim=head_dim, **pairs)
        _write_kv(
            k,
            v,
            layer=layer,
            kv_heads=kv_heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            kv_format=kv_format,
            k_scale=k_scale,
            v_scale=v_scale,
        )
        return _paged_rope(q, positions, cos, sin, heads=q_heads, head_dim=head_dim, **pairs)

    def _write_kv(
        k: Array,
        v: Array,
        *,
        layer: int,
        kv_heads: int,
        head_dim: int,
        v_head_dim: int,
        kv_format: str = "",
        k_scale: Sequence[float] = (),
        v_scale: Sequence[float] = (),
    ) -> Array:
        stored = (_stored(_heads(x, kv_heads), kv_format, s) for x, s in ((k, k_scale), (v, v_scale)))
        cache.append(layer, *stored)
        return np.zeros(0, np.float32)

    def _paged_attention(
        q: Array,
        sinks: Array | None = None,
        slopes: Array | None = None,
        kv_written: Array | None = None,
        *,
        layer: int,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        v_head_dim: int,
        scale: float,
        window: int = 0,
        chunk: int = 0,
        softcap: float = 0.0,
    ) -> Array:
        options = {"scale": scale, "window": window, "chunk": chunk, "softcap": softcap}
        o = cache.attend(_heads(q, q_heads), layer, sinks=sinks, slopes=slopes, **options)
        return o.reshape(len(q), -1)

    functions: dict[str, Callable[..., Array | tuple[Array, ...]]] = {
        "Linear": _linear,
        "GatedLinear": _gated_linear,
        "ExpertLinear": _expert_linear,
        "ExpertGatedLinear": _expert_gated_linear,
        "PickRows": pick_rows,
        "MarkPlaces": math.mark_places,
        "CombineExperts": math.combine_experts,
        "RMSNorm": _rms_norm,
        "LayerNorm": _layer_norm,
        "AddRMSNorm": _add_rms_norm,
        "AddLayerNorm": _add_layer_norm,
        "Activation": _activation,
        "Embedding": _embedding,
        "GatherRows": _gather_rows,
        "Rope": _rope,
        "Attention": _attention,
        "PagedRope": _paged_rope,
        "RopeWriteKV": _rope_write_kv,
        "WriteKV": _write_kv,
        "PagedAttention": _paged_attention,
        "Unpack": unpack,
        "Quantize": quantize,
        "Dequantize": _dequantize,
    }
    return [_operator(ops.DOMAIN, name, function) for name, function in functions.items()]


def _custom_operator(op: CustomOp) -> type[OpRun]:
    domain, _, name = op.name.rpartition(".")

    def run(*inputs: Array | None, **attributes: Any) -> Array | tuple[Array, ...]:
        floats = [x if x is None or x.dtype.kind in "iu" else math.f32(x) for x in inputs]
        return op.reference(*floats, *[None] * (len(op.inputs) - len(floats)), **attributes)

    return _operator(domain, name, run)


def _operator(domain: str, name: str, function: Callable[..., Array | tuple[Array, ...]]) -> type[OpRun]:
    def run(self: OpRun, *inputs: Array | None, **_: Any) -> tuple[Array, ...]:
        attributes = {a.name: helper.get_attribute_value(a) for a in self.onnx_node.attribute}
        attributes = {k: v.decode() if isinstance(v, bytes) else v for k, v in attributes.items()}
        result = function(*inputs, **attributes)
        return result if isinstance(result, tuple) else (result,)

    return type(name, (OpRun,), {"op_domain": domain, "_run": run})
