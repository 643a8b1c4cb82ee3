"""A new attention variant in Triton: the first tokens and a window of the latest (StreamingLLM).

Every query sees the first SINK_TOKENS keys of its sequence and the WINDOW keys before it, whatever the model
was trained with, so that the time of a step stops growing with the length (Xiao et al., "Efficient Streaming
Language Models with Attention Sinks", 2023, without their re-numbering of positions). As long as a sequence
is shorter than the two together, nothing changes.

The tactic takes over castiron.PagedAttention on GPUs: no pattern is needed, since the op exists.

    castiron plugin test examples/plugins/streaming_attention.py
    castiron build MODEL -o ENGINE --target sm_90 --plugin examples/plugins/streaming_attention.py
"""

# ruff: noqa: N803
from __future__ import annotations

from typing import Any

import numpy as np
import triton
import triton.language as tl
from castiron.plugins.sdk import (
    Call,
    Context,
    Example,
    Grid,
    KernelLaunch,
    Lowering,
    Op,
    PagedStep,
    Param,
    Plugin,
    Tactic,
    TritonKernel,
    row_stride,
    step_input,
    value,
)

SINK_TOKENS = 4
WINDOW = 1024
TYPES = {"f32": "*fp32", "bf16": "*bf16", "f16": "*fp16"}


@triton.jit
def streaming_attention(
    q, y, k_cache, v_cache, query_start, kv_len, block_table, q_stride,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_STRIDE: tl.constexpr,
    TABLE_WIDTH: tl.constexpr, SCALE: tl.constexpr, SINKS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """One program: one head of one sequence, row after row; keys in blocks of 32, as the cache holds them."""
    seq = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(query_start + seq)
    rows = tl.load(query_start + seq + 1) - first
    length = tl.load(kv_len + seq)
    width = tl.arange(0, HEAD_DIM)
    keys = tl.arange(0, 32)
    head_offset = head // (Q_HEADS // KV_HEADS) * 32 * HEAD_DIM
    for row in range(rows):
        position = length - rows + row
        query = tl.load(q + (first + row).to(tl.int64) * q_stride + head * HEAD_DIM + width).to(tl.float32)
        peak = -float("inf")
        mass = 0.0
        total = tl.zeros([HEAD_DIM], tl.float32)
        window_begin = tl.maximum(position - WINDOW + 1, 0)
        # Blocks of the sinks, then those of the window; nothing between them is read.
        sink_blocks = tl.minimum(tl.cdiv(SINKS, 32), window_begin // 32)
        skipped = window_begin // 32 - sink_blocks
        for i in range(position // 32 + 1 - skipped):
            block = tl.where(i < sink_blocks, i, i + skipped)
            place = tl.load(block_table + seq * TABLE_WIDTH + block).to(tl.int64) * BLOCK_STRIDE + head_offset
            at = block * 32 + keys
            visible = (at <= position) & ((at < SINKS) | (at >= window_begin))
            tile = place + keys[:, None] * HEAD_DIM + width[None, :]
            k = tl.load(k_cache + tile, mask=visible[:, None], other=0.0).to(tl.float32)
            scores = tl.where(visible, tl.sum(k * query[None, :], 1) * SCALE, -float("inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 0))
            weights = tl.exp(scores - new_peak)
            shrink = tl.exp(peak - new_peak)
            v = tl.load(v_cache + tile, mask=visible[:, None], other=0.0).to(tl.float32)
            total = total * shrink + tl.sum(v * weights[:, None], 0)
            mass = mass * shrink + tl.sum(weights, 0)
            peak = new_peak
        out = y + (first + row).to(tl.int64) * Q_HEADS * HEAD_DIM + head * HEAD_DIM + width
        tl.store(out, (total / mass).to(y.dtype.element_ty))


def fits(op: Op, context: Context) -> bool:
    """Plain causal attention with heads of one width, a power of two."""
    plain = not (op.attrs.get("window") or op.attrs.get("chunk") or op.attrs.get("softcap"))
    width = int(op.attrs["head_dim"])
    alone = op.input(1) is None and op.input(2) is None  # no trained sinks, no ALiBi slopes
    return plain and alone and width == int(op.attrs["v_head_dim"]) and width & (width - 1) == 0


def lower(op: Op, context: Context) -> Lowering:
    """One launch over sequences and heads; all sizes are constants of the kernel."""
    assert context.kv is not None
    q, y = op.required(0), op.outputs[0]
    layer, q_heads = int(op.attrs["layer"]), int(op.attrs["q_heads"])
    item = 4 if context.half == "f32" else 2
    kernel = TritonKernel(
        streaming_attention,
        types={
            "q": TYPES[q.dtype],
            "y": TYPES[y.dtype],
            "k_cache": TYPES[context.half],
            "v_cache": TYPES[context.half],
            **dict.fromkeys(("query_start", "kv_len", "block_table"), "*i32"),
            "q_stride": "i32",
        },
        constants={
            "Q_HEADS": q_heads,
            "KV_HEADS": int(op.attrs["kv_heads"]),
            "HEAD_DIM": int(op.attrs["head_dim"]),
            "BLOCK_STRIDE": context.kv.block_stride // item,
            "TABLE_WIDTH": -(-context.limits.max_seq_len // 32),
            "SCALE": float(op.attrs["scale"]),
            "SINKS": SINK_TOKENS,
            "WINDOW": WINDOW,
        },
        num_warps=1,
    )
    args = (
        value(q.name),
        value(y.name),
        Param("k_cache", layer),
        Param("v_cache", layer),
        step_input("query_start"),
        step_input("kv_len"),
        step_input("block_table"),
        row_stride(q.name),
    )
    launch = KernelLaunch(kernel, (Grid("S"), Grid(times=q_heads)), args)
    return Lowering(
        (Call("demo.streaming_attention", [q.name], [y.name], launches=(launch,), takes_views=True),)
    )


def reference(
    q: np.ndarray[Any, Any],
    *,
    step: PagedStep,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    scale: float,
    **_: Any,
) -> np.ndarray[Any, Any]:
    """The same in float64, one query at a time."""
    y = np.zeros((len(q), q_heads, head_dim))
    queries = q.reshape(len(q), q_heads, head_dim).astype(np.float64)
    for seq, length in enumerate(step.kv_len):
        keys, values = step.held(step.k, seq), step.held(step.v, seq)
        begin, end = step.query_start[seq], step.query_start[seq + 1]
        for row in range(begin, end):
            position = int(length) - (end - row)
            at = np.arange(int(length))
            visible = (at <= position) & ((at < SINK_TOKENS) | (at > position - WINDOW))
            for head in range(q_heads):
                kv_head = head // (q_heads // kv_heads)
                scores = keys[kv_head, visible] @ queries[row, head] * scale
                weights = np.exp(scores - scores.max())
                y[row, head] = weights @ values[kv_head, visible] / weights.sum()
    return y.reshape(len(q), -1)


PLUGIN = Plugin(
    name="streaming-attention",
    tactics=(
        Tactic(
            "demo.streaming_attention",
            "castiron.PagedAttention",
            "cuda",
            fits,
            lower,
            # Below every built-in tactic: whoever names this plugin wants it.
            lambda op, context, tokens: 0.0,
            reference,
        ),
    ),
    examples=(
        Example(
            "castiron.PagedAttention",
            (("T", 4 * 16),),
            {"layer": 0, "q_heads": 4, "kv_heads": 2, "head_dim": 16, "v_head_dim": 16, "scale": 0.25},
            kv=(2, 16, 16),
        ),
    ),
)
