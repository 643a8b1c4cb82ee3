"""A tiny engine made by hand with numpy alone, and the same model in float64: one transformer layer, 53
tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from castiron.engines import (
    EngineWriter,
    KvLayer,
    Limits,
    MemoryRow,
    ModelIdentity,
    Program,
    SpecialTokens,
    Step,
    Value,
    Weight,
    make_golden,
)

VOCAB, HIDDEN, HEADS, KV_HEADS, DIM, INNER = 53, 32, 4, 2, 8, 40
LIMITS = Limits(max_batch_size=4, max_num_tokens=16, max_logit_rows=16, max_seq_len=96)
EPS = 1e-5


@dataclass
class ArraySource:
    """A PackedSource over an array in memory, yielded in pieces."""

    name: str
    dtype: str
    array: np.ndarray[Any, Any]

    @property
    def stored_shape(self) -> Sequence[int]:
        return [self.array.size]

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    def chunks(self) -> Iterator[np.ndarray[Any, Any]]:
        yield from np.array_split(self.array, 3)


def pack(array: np.ndarray[Any, Any], layout: str, dtype: str) -> np.ndarray[Any, Any]:
    """Lay ``array`` out as docs/program.md says, zero-padded up to 64 bytes; one-dimensional."""
    kind = ml_dtypes.bfloat16 if dtype == "bf16" else np.float32
    if layout != "plain":
        rows, columns = array.shape
        pair = 2 if layout == "panel16x2" else 1
        padded = np.zeros((-(-rows // 16) * 16, -(-columns // pair) * pair), np.float64)
        padded[:rows, :columns] = array
        array = padded.reshape(len(padded) // 16, 16, -1, pair).transpose(0, 2, 1, 3)
    flat = array.astype(np.float32).astype(kind).reshape(-1)
    return np.concatenate([flat, np.zeros(-flat.nbytes % 64 // flat.itemsize, kind)])


def interleave(gate: np.ndarray[Any, Any], up: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Alternate blocks of 16 rows of ``gate`` and ``up``, zero-padded."""
    blocks = -(-len(gate) // 16)
    mixed = np.zeros((blocks, 2, 16, gate.shape[1]))
    for place, matrix in enumerate((gate, up)):
        padded = np.zeros((blocks * 16, gate.shape[1]))
        padded[: len(matrix)] = matrix
        mixed[:, place] = padded.reshape(blocks, 16, -1)
    return mixed.reshape(blocks * 32, -1)


class TinyModel:
    """The model in float64; weights are exactly representable in ``dtype``, so that packing loses nothing."""

    def __init__(self, dtype: str = "f32", seed: int = 1) -> None:
        rng = np.random.default_rng(seed)
        kind = ml_dtypes.bfloat16 if dtype == "bf16" else np.float32
        self.dtype = dtype

        def draw(*shape: int) -> np.ndarray[Any, Any]:
            return (rng.standard_normal(shape) * 0.4).astype(np.float32).astype(kind).astype(np.float64)

        self.embed = draw(VOCAB, HIDDEN)
        self.qkv = draw((HEADS + 2 * KV_HEADS) * DIM, HIDDEN)
        self.out = draw(HIDDEN, HEADS * DIM)
        self.gate, self.up, self.down = draw(INNER, HIDDEN), draw(INNER, HIDDEN), draw(HIDDEN, INNER)
        self.head = draw(VOCAB, HIDDEN)
        self.norms = [draw(HIDDEN).astype(np.float32).astype(np.float64) + 1.0 for _ in range(3)]
        angles = np.arange(LIMITS.max_seq_len)[:, None] * 10000.0 ** (-np.arange(DIM // 2) * 2 / DIM)
        self.cos, self.sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def logits(self, token_ids: Sequence[int], rows: Sequence[int]) -> np.ndarray[Any, Any]:
        """One pass over all tokens: float32 [len(rows), VOCAB]."""
        count = len(token_ids)
        x = self.embed[list(token_ids)]
        qkv = self._norm(x, 0) @ self.qkv.T
        q, k, v = np.split(qkv.reshape(count, -1, DIM), [HEADS, HEADS + KV_HEADS], axis=1)
        q, k = self._rope(q), self._rope(k)
        k, v = (np.repeat(part, HEADS // KV_HEADS, axis=1) for part in (k, v))
        scores = np.einsum("ihd,jhd->hij", q, k) * DIM**-0.5
        scores = np.where(np.tri(count, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        x = x + np.einsum("hij,jhd->ihd", weights, v).reshape(count, -1) @ self.out.T
        h = self._norm(x, 1)
        gate = h @ self.gate.T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ self.up.T)) @ self.down.T
        return (self._norm(x, 2)[list(rows)] @ self.head.T).astype(np.float32)

    def _norm(self, x: np.ndarray[Any, Any], index: int) -> np.ndarray[Any, Any]:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * self.norms[index]

    def _rope(self, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        cos, sin = (table[: len(x), None].astype(np.float64) for table in (self.cos, self.sin))
        a, b = x[..., : DIM // 2], x[..., DIM // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def sources(self) -> list[ArraySource]:
        """All weights, packed."""
        panel = "panel16x2" if self.dtype == "bf16" else "panel16"
        matrices = {
            "qkv": self.qkv,
            "out": self.out,
            "gate_up": interleave(self.gate, self.up),
            "down": self.down,
            "head": self.head,
        }
        plain = {
            "norm0": self.norms[0],
            "norm1": self.norms[1],
            "norm2": self.norms[2],
            "cos": self.cos,
            "sin": self.sin,
        }
        return [
            ArraySource("embed", self.dtype, pack(self.embed, "plain", self.dtype)),
            *(
                ArraySource(name, self.dtype, pack(array, panel, self.dtype))
                for name, array in matrices.items()
            ),
            *(ArraySource(name, "f32", pack(array, "plain", "f32")) for name, array in plain.items()),
        ]

    def program(self) -> Program:
        """The same model as steps of docs/program.md."""
        panel = "panel16x2" if self.dtype == "bf16" else "panel16"
        values: list[Value] = []
        end = 0
        widths = {
            "x": HIDDEN,
            "n0": HIDDEN,
            "qkv": (HEADS + 2 * KV_HEADS) * DIM,
            "q2": HEADS * DIM,
            "att": HEADS * DIM,
        }
        widths |= {"x1": HIDDEN, "n1": HIDDEN, "mid": INNER, "x2": HIDDEN}
        shapes: dict[str, tuple[str, list[Any]]] = {
            "token_ids": ("i32", ["T"]),
            "positions": ("i32", ["T"]),
            "logit_rows": ("i32", ["N"]),
            **{name: ("f32", ["T", width]) for name, width in widths.items()},
            "last": ("f32", ["N", HIDDEN]),
            "n2": ("f32", ["N", HIDDEN]),
            "logits": ("f32", ["N", VOCAB]),
        }
        for name, (dtype, shape) in shapes.items():
            values.append(Value(name=name, dtype=dtype, shape=shape, offset=end))  # type: ignore[arg-type]
            size = LIMITS.max_num_tokens * (shape[1] if len(shape) > 1 else 1) * 4
            end += -(-size // 64) * 64
        for name, column, width in (
            ("q", 0, HEADS),
            ("k", HEADS, KV_HEADS),
            ("v", HEADS + KV_HEADS, KV_HEADS),
        ):
            values.append(
                Value(name=name, dtype="f32", shape=["T", width * DIM], base="qkv", column=column * DIM)
            )
        cache = {"layer": 0, "kv_heads": KV_HEADS, "head_dim": DIM, "v_head_dim": DIM, "q_heads": HEADS}
        rotary = {"rotary_dim": DIM, "interleaved": False, "concat_halves": False}
        linear = {"activation": "none", "alpha": 1.0, "has_bias": False}
        norm = {"eps": EPS, "has_weight": True, "group": HIDDEN}
        window = {"window": 0, "chunk": 0, "softcap": 0.0, "has_sinks": False, "has_slopes": False}

        def step(kernel: str, inputs: str, weights: str, outputs: str, attrs: dict[str, Any]) -> Step:
            return Step(
                kernel=kernel,
                inputs=inputs.split(),
                weights=weights.split(),
                outputs=outputs.split(),
                attrs=attrs,
            )

        plain, extra = {**linear, "has_residual": False}, {**linear, "has_residual": True}
        steps = [
            step("embedding", "token_ids", "embed", "x", {"scale": 1.0, "index_offset": 0}),
            step("rms_norm", "x", "norm0", "n0", norm),
            step("linear", "n0", "qkv", "qkv", plain),
            step("rope_write_kv", "q k v positions", "cos sin", "q2", {**cache, **rotary}),
            step("paged_attention", "q2", "", "att", {**cache, **window, "scale": DIM**-0.5}),
            step("linear", "att x", "out", "x1", extra),
            step("rms_norm", "x1", "norm1", "n1", norm),
            step("gated_linear", "n1", "gate_up", "mid", {"activation": "silu", "has_bias": False}),
            step("linear", "mid x1", "down", "x2", extra),
            step("gather_rows", "x2 logit_rows", "", "last", {}),
            step("rms_norm", "last", "norm2", "n2", norm),
            step("linear", "n2", "head", "logits", plain),
        ]
        matrices = {
            "qkv": self.qkv.shape,
            "out": self.out.shape,
            "gate_up": (-(-INNER // 16) * 32, HIDDEN),
            "down": self.down.shape,
            "head": self.head.shape,
        }
        tables = {name: [HIDDEN] for name in ("norm0", "norm1", "norm2")} | {
            name: list(self.cos.shape) for name in ("cos", "sin")
        }
        weights = [Weight(name="embed", dtype=self.dtype, layout="plain", shape=[VOCAB, HIDDEN])]  # type: ignore[arg-type]
        weights += [
            Weight(name=name, dtype=self.dtype, layout=panel, shape=list(shape))  # type: ignore[arg-type]
            for name, shape in matrices.items()
        ]
        weights += [
            Weight(name=name, dtype="f32", layout="plain", shape=shape) for name, shape in tables.items()
        ]
        layer = KvLayer(kv_heads=KV_HEADS, head_dim=DIM, v_head_dim=DIM, dtype=self.dtype)  # type: ignore[arg-type]
        return Program(
            format=(1, 0),
            target="host",
            vocab_size=VOCAB,
            limits=LIMITS,
            arena_bytes=end,
            values=values,
            weights=weights,
            steps=steps,
            kv_layers=[layer],
        )


IDENTITY = ModelIdentity(
    name="tiny",
    source="/models/tiny model",
    architecture="TinyForCausalLM",
    model_type="tiny",
    config_sha256="0" * 64,
    source_sha256="1" * 64,
    source_dtype="float32",
    dtype="float32",
    parameters=9312,
)
TOKENS = SpecialTokens(eos_token_ids=[2], vocab_size=VOCAB, vocab_size_used=50)


def fill_writer(
    writer: EngineWriter,
    model: TinyModel,
    golden: bool = True,
    more: Callable[[EngineWriter], None] | None = None,
) -> None:
    """Everything between ``with EngineWriter`` and its end. ``more``: adds programs of other targets."""
    writer.add_program(model.program())
    if more is not None:
        more(writer)
    writer.add_graph(b"\x08\x0agraph")
    if golden:
        writer.add_golden(make_golden(model, TOKENS.vocab_size_used, LIMITS, seed=7))
    writer.add_build_report({"passes": [{"name": "qkv_fusion", "applied": 1}], "phases": {"capture": 0.5}})
    writer.write_weights(model.sources())
    dtype = "bfloat16" if model.dtype == "bf16" else "float32"
    writer.finish(
        model=IDENTITY.model_copy(update={"dtype": dtype}),
        special_tokens=TOKENS,
        memory_plan=[
            MemoryRow(item="weights", bytes=100_000, note="packed"),
            MemoryRow(item="arena", bytes=4096),
        ],
    )


def write_tiny_engine(
    folder: Path,
    dtype: str = "f32",
    golden: bool = True,
    more: Callable[[EngineWriter], None] | None = None,
) -> Path:
    """Write the tiny engine to ``folder`` and return it."""
    with EngineWriter(folder) as writer:
        fill_writer(writer, TinyModel(dtype), golden, more)
    return folder
