"""A program run step by step in numpy, for one sequence: what docs/program.md says, and nothing smarter.

Every value lives at its planned offset of one arena, so that overlapping lifetimes and wrong views show up as
wrong numbers. Weights are decoded from the packed bytes. A kernel computes in float64, values are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import erf
from typing import Any

import ml_dtypes
import numpy as np
from castiron.engines.program import Program, Step, Value, Weight
from castiron.graph.fake_quant import fake_quantize

Array = np.ndarray[Any, Any]


#: Elements as they are stored; codes of four bits are bytes first.
DTYPES = {
    "f32": np.float32,
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
    "i8": np.int8,
    "f8e4m3": ml_dtypes.float8_e4m3fn,
    "i4": np.uint8,
    "f4e2m1": np.uint8,
    "i32": np.int32,
}


def unpack(weight: Weight, data: bytes) -> Array:
    """The logical tensor, from the stored bytes of its layout; codes become the numbers they stand for."""
    flat = np.frombuffer(data, np.dtype(DTYPES[weight.dtype]))
    if weight.layout == "plain":
        return flat[: int(np.prod(weight.shape))].reshape(weight.shape).astype(np.float32)
    n, k = weight.shape
    if weight.layout.startswith("panel16x4"):
        return _unpack_quads(flat, weight)[:n, :k]
    panels = -(-n // 16)
    if weight.layout == "panel16":
        matrix = flat[: panels * k * 16].reshape(panels, k, 16).transpose(0, 2, 1).reshape(panels * 16, k)
    else:
        pairs = -(-k // 2)
        cut = flat[: panels * pairs * 32].reshape(panels, pairs, 16, 2)
        matrix = cut.transpose(0, 2, 1, 3).reshape(panels * 16, pairs * 2)
    return matrix[:n, :k].astype(np.float32)


def _unpack_quads(flat: Array, weight: Weight) -> Array:
    panels, quads = -(-weight.shape[0] // 16), -(-weight.shape[1] // 4)
    if weight.layout == "panel16x4":
        cut = flat[: panels * quads * 64].astype(np.float32).reshape(panels, quads, 16, 4)
    else:
        both = flat[: panels * quads * 32].reshape(panels, quads, 8, 4)
        codes = np.concatenate([both & 15, both >> 4], 2)
        if weight.dtype == "i4":
            cut = codes.astype(np.float32) - 8
        else:
            # Four bits are the upper half of no float type of numpy's: the standard's table by itself
            magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
            cut = magnitudes[codes & 7] * np.where(codes & 8, np.float32(-1), np.float32(1))
    return cut.transpose(0, 2, 1, 3).reshape(panels * 16, quads * 4)


class Interpreter:
    """Runs steps of a program over an arena; keeps the KV cache between runs."""

    def __init__(self, program: Program, sources: Mapping[str, Any], fill: float = np.nan) -> None:
        """``sources``: packed bytes by weight name (``chunks()``). ``fill`` poisons unwritten bytes."""
        self.program = program
        self.values = {value.name: value for value in program.values}
        self.weights = {w.name: unpack(w, _joined(sources[w.name].chunks())) for w in program.weights}
        self.arena = np.full(program.arena_bytes // 4 + 16, fill, np.float32)
        self.cache: dict[int, tuple[Array, Array]] = {}
        self.length = 0

    def run(self, token_ids: Iterable[int], rows: Iterable[int] | None = None) -> Array:
        """Logits [N, vocab] for the next tokens of the sequence."""
        ids = np.asarray(list(token_ids), np.int32)
        wanted = np.asarray(range(len(ids)) if rows is None else list(rows), np.int32)
        self.sizes = {"T": len(ids), "N": len(wanted)}
        assert len(ids) <= self.program.limits.max_num_tokens
        assert len(wanted) <= self.program.limits.max_logit_rows
        positions = np.arange(self.length, self.length + len(ids), dtype=np.int32)
        self.write("token_ids", ids)
        self.write("positions", positions)
        self.write("logit_rows", wanted)
        for step in self.program.steps:
            inputs = [self.read(name).copy() for name in step.inputs]
            outputs = KERNELS[step.kernel](self, step, inputs, [self.weights[name] for name in step.weights])
            for name, array in zip(step.outputs, outputs, strict=True):
                self.write(name, array)
        self.length += len(ids)
        return self.read("logits").copy()

    def place(self, name: str) -> Array:
        """The value's bytes in the arena, as an array that writes through."""
        value = self.values[name]
        shape = tuple(self.sizes.get(d, d) if isinstance(d, str) else d for d in value.shape)
        if value.base is not None:
            base = self.place(value.base)
            return base[:, value.column : value.column + shape[1]]
        count = int(np.prod(shape))
        assert value.offset % 64 == 0
        assert value.offset + 4 * count <= self.program.arena_bytes, name
        cells = self.arena[value.offset // 4 : value.offset // 4 + count]
        return _typed(cells, value).reshape(shape)

    def read(self, name: str) -> Array:
        return self.place(name)

    def write(self, name: str, array: Array) -> None:
        assert self.values[name].base is None, f"{name} is a view and may not be written"
        target = self.place(name)
        assert target.shape == array.shape, (name, target.shape, array.shape)
        target[...] = array.astype(target.dtype)


def _typed(cells: Array, value: Value) -> Array:
    return cells.view(np.int32) if value.dtype == "i32" else cells


def _joined(chunks: Iterable[Any]) -> bytes:
    return b"".join(bytes(chunk) for chunk in chunks)


def _erf(x: Array) -> Array:
    return np.vectorize(erf, otypes=[np.float64])(x)


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "none": lambda x: x,
    "silu": lambda x: x * _sigmoid(x),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "gelu_erf": lambda x: 0.5 * x * (1 + _erf(x / np.sqrt(2))),
    "gelu_quick": lambda x: x * _sigmoid(1.702 * x),
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "tanh": np.tanh,
    "sigmoid": _sigmoid,
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "neg": np.negative,
    "abs": np.abs,
    "reciprocal": np.reciprocal,
    "softplus": lambda x: np.logaddexp(x, 0),
    "sin": np.sin,
    "cos": np.cos,
    "erf": _erf,
    "square": np.square,
}
BINARY = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "min": np.minimum,
    "max": np.maximum,
    "pow": np.power,
}


def _wide(x: Array) -> Array:
    return x.astype(np.float64)


def _embedding(run: Interpreter, step: Step, x: list[Array], w: list[Array]) -> list[Array]:
    return [step.attrs.get("scale", 1.0) * w[0][x[0] + step.attrs.get("index_offset", 0)]]


def _linear(run: Interpreter, step: Step, x: list[Array], w: list[Array]) -> list[Array]:
    y = _wide(x[0]) @ _wide(w[0]).T
    y = FUNCTIONS[step.attrs["activation"]](y + w[1] if step.attrs["has_bias"] else y) * step.attrs["alpha"]
    return [y + x[1] if step.attrs["has_residual"] else y]


def _gated_linear(run: Interpreter, step: Step, x: list[Array], w: list[Array]) -> list[Array]:
    y = _wide(x[0]) @ _wide(w[0]).T
    y = (y + w[1] if step.attrs["has_bias"] else y).reshape(len(y), -1, 2, 16)
    width = run.values[step.outputs[0]].shape[1]
    gated = FUNCTIONS[step.attrs["activation"]](y[:, :, 0]) * y[:, :, 1]
    return [gated.reshape(len(y), -1)[:, :width]]


def _dequantized(step: Step, w: list[Array]) -> tuple[Array, list[Array]]:
    """The matrix that codes and scales stand for, columns in the order of x, and the weights behind it."""
    rest = list(w)
    codes, scales = rest.pop(0), rest.pop(0)
    group = step.attrs["group"] or codes.shape[1]
    wide = [np.repeat(_wide(scales), group, 1)]
    if step.attrs["has_offsets"]:
        wide.append(np.repeat(_wide(rest.pop(0)), group, 1))
    matrix = _wide(codes) * wide[0][:, : codes.shape[1]]
    matrix = matrix + wide[1][:, : codes.shape[1]] if len(wide) == 2 else matrix
    if step.attrs["has_columns"]:
        straight = np.empty_like(matrix)
        straight[:, rest.pop(0).astype(np.int64)] = matrix
        matrix = straight
    return matrix, rest


def _rounded(step: Step, x: Array) -> Array:
    form = step.attrs["x_format"]
    scale = float(step.attrs["x_scale"])
    return fake_quantize(x, "" if form == "float" else form, step.attrs["x_group"], scale)


def _quantized(kernel: Any) -> Any:
    """A kernel of ``_linear``'s kind over the matrix that the codes stand for.

    Columns are put in order before x is rounded: right as long as a group of x holds the same numbers, that
    is for x_group 0 or columns in order.
    """

    def run(run: Interpreter, step: Step, x: list[Array], w: list[Array]) -> list[Array]:
        matrix, rest = _dequantized(step, w)
        rounded: list[Array] = kernel(run, step, [_rounded(step, x[0]), *x[1:]], [matrix, *rest])
        return rounded

    return run


def _normalize(x: Array, step: Step, w: list[Array], center: bool) -> Array:
    group = step.attrs.get("group", x.shape[1])
    y = _wide(x).reshape(len(x), -1, group)
    y = y - y.mean(-1, keepdims=True) if center else y
    y = y / np.sqrt((y**2).mean(-1, keepdims=True) + step.attrs["eps"])
    rest = list(w)
    y = y * rest.pop(0) if step.attrs["has_weight"] else y
    y = y + rest.pop(0) if step.attrs.get("has_bias") else y
    return y.reshape(x.shape)


def _norm(center: bool, add: bool) -> Any:
    def kernel(run: Interpreter, step: Step, x: list[Array], w: list[Array]) -> list[Array]:
        if not add:
            return [_normalize(x[0], step, w, center)]
        total = x[0] + x[1]
        return [_normalize(total, step, w, center), total]

    return kernel


def _rotate(x: Array, heads: int, step: Step, positions: Array, w: list[Array]) -> Array:
    attrs = step.attrs
    y = _wide(x).reshape(len(x), heads, attrs["head_dim"])
    half = attrs["rotary_dim"] // 2
    assert w[0].shape[1] == half
    cos, sin = (table[positions][:, None, :] for table in w)
    turning = y[:, :, : 2 * half]
    if attrs["interleaved"]:
        a, b = turning[:, :, 0::2], turning[:, :, 1::2]
    else:
        a, b = turning[:, :, :half], turning[:, :, half:]
    first, second = a * cos - b * sin, b * cos + a * sin
    out = y.copy()
    if attrs["interleaved"] and not attrs["concat_halves"]:
        out[:, :, 0 : 2 * half : 2], out[:, :, 1 : 2 * half : 2] = first, second
    else:
        out[:, :, :half], out[:, :, half : 2 * half] = first, second
    return out.reshape(x.shape)


def _rope(run: Interpreter, step: Step, x: list[Array], w: list[Array]) -> list[Array]:
    return [_rotate(x[0], step.attrs["heads"], step, x[1], w)]


def _store(run: Interpreter, step: Step, k: Array, v: Array) -> None:
    attrs = step.attrs
    layer = run.program.kv_layers[attrs["layer"]]
    heads = [
        (t.reshape(len(t), attrs["kv_heads"], attrs[size]), scales)
        for t, size, scales in ((k, "head_dim", layer.k_scale), (v, "v_head_dim", layer.v_scale))
    ]
    new = [_as_cached(t, layer.dtype, scales) for t, scales in heads]
    old = run.cache.get(attrs["layer"])
    held = (
        new if old is None else [np.concatenate([o[: run.length], n]) for o, n in zip(old, new, strict=True)]
    )
    run.cache[attrs["layer"]] = (held[0], held[1])


def _as_cached(x: Array, dtype: str, scales: list[float]) -> Array:
    """[T, heads, D] as the cache gives it back."""
    if dtype in ("f32", "bf16"):
        return x.astype(np.dtype(DTYPES[dtype])).astype(np.float32)
    by_head = np.asarray(scales or [1.0] * x.shape[1], np.float32)[:, None]
    return fake_quantize(x / by_head, {"i8": "int8", "f8e4m3": "fp8"}[dtype], x_scale=1.0) * by_head


def _rope_write_kv(run: Interpreter, step: Step, x: list[Array], w: list[Array]) -> list[Array]:
    q, k, v, positions = x
    _store(run, step, _rotate(k, step.attrs["kv_heads"], step, positions, w).astype(np.float32), v)
    return [_rotate(q, step.attrs["q_heads"], step, positions, w)]


def _write_kv(run: Interpreter, step: Step, x: list[Array], w: list[Array]) -> list[Array]:
    _store(run, step, x[0], x[1])
    return []


def _paged_attention(run: Interpreter, step: Step, x: list[Array], w: list[Array]) -> list[Array]:
    attrs = step.attrs
    heads, kv_heads = attrs["q_heads"], attrs["kv_heads"]
    q = _wide(x[0]).reshape(len(x[0]), heads, attrs["head_dim"])
    k, v = (np.repeat(_wide(t), heads // kv_heads, axis=1) for t in run.cache[attrs["layer"]])
    rest = list(w)
    sinks = rest.pop(0) if attrs["has_sinks"] else None
    slopes = rest.pop(0) if attrs["has_slopes"] else None
    i, j = np.arange(run.length, run.length + len(q))[:, None], np.arange(len(k))[None, :]
    visible = j <= i
    if attrs["window"]:
        visible &= i - j < attrs["window"]
    if attrs["chunk"]:
        visible &= i // attrs["chunk"] == j // attrs["chunk"]
    scores = np.einsum("ihd,jhd->hij", q, k) * attrs["scale"]
    if attrs["softcap"]:
        scores = attrs["softcap"] * np.tanh(scores / attrs["softcap"])
    if slopes is not None:
        scores = scores + slopes[:, None, None] * (j - i)
    scores = np.where(visible, scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    top = top if sinks is None else np.maximum(top, sinks[:, None, None])
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True) + (0 if sinks is None else np.exp(sinks[:, None, None] - top))
    return [np.einsum("hij,jhd->ihd", weights / total, v).reshape(len(q), -1)]


def _copy(run: Interpreter, step: Step, x: list[Array], w: list[Array]) -> list[Array]:
    shape = run.place(step.outputs[0]).shape
    return [np.ascontiguousarray(x[0]).reshape(shape)]


def _binary(run: Interpreter, step: Step, x: list[Array], w: list[Array]) -> list[Array]:
    a, b = x[0], w[0] if step.attrs["b_weight"] else x[1]
    a, b = (b, a) if step.attrs["reverse"] else (a, b)
    return [BINARY[step.attrs["fn"]](_wide(a), _wide(b))]


def _slice(run: Interpreter, step: Step, x: list[Array], w: list[Array]) -> list[Array]:
    axis, start, stride = (step.attrs[name] for name in ("axis", "start", "step"))
    length = run.place(step.outputs[0]).shape[axis]
    return [np.take(x[0], start + stride * np.arange(length), axis=axis)]


def _reduce(run: Interpreter, step: Step, x: list[Array], w: list[Array]) -> list[Array]:
    reduced = {"sum": np.sum, "mean": np.mean, "max": np.max}[step.attrs["fn"]](_wide(x[0]), axis=-1)
    return [reduced.reshape(run.place(step.outputs[0]).shape)]


def _softmax(run: Interpreter, step: Step, x: list[Array], w: list[Array]) -> list[Array]:
    e = np.exp(_wide(x[0]) - x[0].max(-1, keepdims=True))
    return [e / e.sum(-1, keepdims=True)]


def _gather(run: Interpreter, step: Step, x: list[Array], w: list[Array]) -> list[Array]:
    data, indices = (w[0], x[0]) if step.attrs["x_weight"] else (x[0], x[1])
    return [np.take(data, indices, axis=step.attrs["axis"])]


KERNELS: dict[str, Callable[[Interpreter, Step, list[Array], list[Array]], list[Array]]] = {
    "embedding": _embedding,
    "linear": _linear,
    "gated_linear": _gated_linear,
    "quantized_linear": _quantized(_linear),
    "quantized_gated_linear": _quantized(_gated_linear),
    "rms_norm": _norm(center=False, add=False),
    "add_rms_norm": _norm(center=False, add=True),
    "layer_norm": _norm(center=True, add=False),
    "add_layer_norm": _norm(center=True, add=True),
    "rope": _rope,
    "rope_write_kv": _rope_write_kv,
    "write_kv": _write_kv,
    "paged_attention": _paged_attention,
    "gather_rows": lambda run, step, x, w: [x[0][x[1]]],
    "unary": lambda run, step, x, w: [FUNCTIONS[step.attrs["fn"]](_wide(x[0]))],
    "binary": _binary,
    "clip": lambda run, step, x, w: [np.clip(x[0], step.attrs["min"], step.attrs["max"])],
    "transpose": lambda run, step, x, w: [np.ascontiguousarray(x[0].transpose(step.attrs["perm"]))],
    "copy": _copy,
    "slice": _slice,
    "concat": lambda run, step, x, w: [np.concatenate(x, axis=step.attrs["axis"])],
    "reduce": _reduce,
    "softmax": _softmax,
    "matmul": lambda run, step, x, w: [_wide(x[0]) @ _wide(x[1])],
    "gather": _gather,
}
