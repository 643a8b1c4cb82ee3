"""Prefill and split-KV attention, interpreted, against numpy in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from castiron.plugins import Context, Op, Operand
from castiron.plugins.cuda import attention
from interpret import TORCH
from paged import Case, Step

(ATTENTION,) = attention.TACTICS
NAMES = {dtype: name for name, dtype in TORCH.items()}
#: (rows, tokens before): decodes and prefills side by side, prefixes around the borders of blocks of 32.
MIXED = [(1, 31), (3, 31), (1, 32), (2, 32), (40, 33), (1, 0), (70, 0)]
#: Weights are rounded to the cache's type before they meet the values, results to their own: half a step
#: each of sums of about 1. In float32 what remains are sums of a few hundred products.
TOLERANCES = {"f32": 3e-6, "f16": 2e-3, "bf16": 1.6e-2}


def attend(
    step: Step,
    q_heads: int,
    *,
    q_dtype: str = "bf16",
    out_dtype: str = "bf16",
    sinks: bool = False,
    slopes: bool = False,
    **mask: Any,
) -> tuple[torch.Tensor, np.ndarray[Any, Any], list[str]]:
    """Results, expected results, and the kernels that ran."""
    case = step.case
    q = step.rows(q_heads * case.head_dim, q_dtype, margin=8)
    out = torch.full((step.counts["T"], q_heads * case.v_head_dim), float("nan"), dtype=TORCH[out_dtype])
    sink = step.normal(q_heads) if sinks else None
    slope = torch.rand(q_heads, generator=step.random) * 0.2 if slopes else None
    attrs = {
        "layer": 1,
        "q_heads": q_heads,
        "kv_heads": case.kv_heads,
        "head_dim": case.head_dim,
        "v_head_dim": case.v_head_dim,
        "scale": case.head_dim**-0.5,
        **mask,
    }
    constants = [
        None if tensor is None else Operand(name, tuple(tensor.shape), constant=True)
        for name, tensor in (("sinks", sink), ("slopes", slope))
    ]
    operands = (
        Operand("q", ("T", q.shape[1]), NAMES[q.dtype]),  # type: ignore[arg-type]
        *constants,
    )
    result = Operand("out", ("T", out.shape[1]), NAMES[out.dtype])  # type: ignore[arg-type]
    op = Op("castiron.PagedAttention", operands, (result,), attrs)
    weights = [tensor for tensor in (sink, slope) if tensor is not None]
    ran = step.run(ATTENTION, op, {"q": q, "out": out}, weights)
    assert ATTENTION.reference is not None
    (expected,) = ATTENTION.reference(
        q.double().numpy(),
        None if sink is None else sink.numpy(),
        None if slope is None else slope.numpy(),
        None,
        step=step.reference(),
        **{**attrs, **step.rounding},
    )
    return out, expected, ran


def assert_close(step: Step, out: torch.Tensor, expected: np.ndarray[Any, Any], tolerance: float) -> None:
    real = step.tokens
    np.testing.assert_allclose(out[:real].double().numpy(), expected[:real], atol=tolerance, rtol=0)
    assert out[real:].isnan().all()  # padding rows are not written


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim", "v_head_dim", "options"),
    [
        (2, 2, 64, 64, {}),
        (6, 2, 64, 64, {"window": 20}),
        (8, 1, 80, 64, {"softcap": 5.0}),
        (2, 1, 128, 128, {"sinks": True}),
        (2, 2, 64, 64, {"slopes": True}),
        (2, 1, 64, 96, {"chunk": 24}),
        (2, 1, 16, 16, {"sinks": True, "window": 33, "softcap": 3.0}),
        (3, 1, 96, 96, {"slopes": True, "window": 50}),
    ],
    ids=str,
)
def test_mixed_steps_attend_as_the_reference(
    q_heads: int, kv_heads: int, head_dim: int, v_head_dim: int, options: dict[str, Any]
) -> None:
    step = Case(MIXED, kv_heads, head_dim, v_head_dim).build()
    out, expected, ran = attend(step, q_heads, **options)
    assert ran == ["attention_prefill", "attention_decode", "attention_reduce"]
    assert_close(step, out, expected, TOLERANCES["bf16"])


@pytest.mark.parametrize(("half", "q_dtype", "out_dtype"), [("f32", "f32", "f32"), ("f16", "f32", "f16")])
def test_caches_of_other_types(half: str, q_dtype: str, out_dtype: str) -> None:
    step = Case(MIXED, 1, 32, 32, half=half).build()
    out, expected, _ = attend(step, 2, q_dtype=q_dtype, out_dtype=out_dtype)
    assert_close(step, out, expected, TOLERANCES[half])


@pytest.mark.parametrize(
    ("cache", "target", "half"),
    [("i8", "sm_90", "bf16"), ("f8e4m3", "sm_90", "bf16"), ("f8e4m3", "sm_80", "f16")],
)
def test_caches_of_codes_under_scales_of_heads(cache: str, target: str, half: str) -> None:
    step = Case(MIXED, 2, 48, 32, half=half, target=target, cache=cache).build()
    out, expected, _ = attend(step, 4, q_dtype=half, out_dtype=half)
    # Codes meet queries and weights exactly: what rounds is what rounds without them.
    assert_close(step, out, expected, TOLERANCES[half])


def test_a_launch_without_sequences_is_skipped() -> None:
    decodes = Case([(1, 40), (1, 5)], 1, 32, 32, padding=0).build()
    out, expected, ran = attend(decodes, 2)
    assert ran == ["attention_decode", "attention_reduce"]
    assert_close(decodes, out, expected, TOLERANCES["bf16"])
    prefills = Case([(4, 40)], 1, 32, 32, padding=0).build()
    out, expected, ran = attend(prefills, 2)
    assert ran == ["attention_prefill"]
    assert_close(prefills, out, expected, TOLERANCES["bf16"])


def test_a_decoded_row_is_the_same_bits_next_to_any_others() -> None:
    step = Case([(1, 300), (1, 60), (7, 9)], 1, 32, 32).build()
    q = step.rows(64, "bf16")
    attrs = {"layer": 1, "q_heads": 2, "kv_heads": 1, "head_dim": 32, "v_head_dim": 32, "scale": 32**-0.5}
    op = Op(
        "castiron.PagedAttention",
        (Operand("q", ("T", 64), "bf16"), None, None),
        (Operand("out", ("T", 64), "bf16"),),
        attrs,
    )
    rows = []
    # Alone; with others; and in so large a batch that one program takes all four splits in turn.
    for decodes in ([0], [1, 0], [0] + [-1] * 600):
        step.inputs["decode_seq"] = torch.tensor(decodes, dtype=torch.int32)
        step.counts["D"] = len(decodes)
        out = torch.full((step.counts["T"], 64), float("nan"), dtype=torch.bfloat16)
        step.run(ATTENTION, op, {"q": q, "out": out})
        rows.append(out[0])
    assert not rows[0].isnan().any()
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])


def test_splits_fill_the_device_but_not_its_memory() -> None:
    context = Case([(2, 0)], 8, 128, 128).build().context
    large = context.limits.model_copy(update={"max_batch_size": 256, "max_seq_len": 131072})
    context = Context(context.target, context.half, large, context.kv, context.prefill_tile)
    # 132 multiprocessors twice over by 8 KV heads would be 33; a split of 256 sequences takes 4.3 MB.
    assert attention.split_count(context, 32, 8, 128) == 15
    few = Context(
        context.target,
        context.half,
        large.model_copy(update={"max_batch_size": 8}),
        context.kv,
        context.prefill_tile,
    )
    assert attention.split_count(few, 32, 8, 128) == 33
