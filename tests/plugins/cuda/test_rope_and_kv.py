"""Rotation and stores into the paged cache, interpreted, against numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from castiron.plugins import Op, Operand
from castiron.plugins.cuda import kv, rope
from interpret import TORCH
from paged import Case, Step

ROPE, ROPE_WRITE_KV = rope.TACTICS
(WRITE_KV,) = kv.TACTICS
SEQUENCES = [(3, 30), (1, 63), (2, 0)]
#: A rotation rounds each of two products and their sum in float32, then the result to its storage type.
TOLERANCES = {"f32": 1e-6, "f16": 1.2e-3, "bf16": 1e-2}


def tables(step: Step, rotary_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.rand(128, rotary_dim // 2, generator=step.random) * 6
    return angles.cos(), angles.sin()


def operand(name: str, tensor: torch.Tensor, *, constant: bool = False) -> Operand:
    dtype = {v: k for k, v in TORCH.items()}[tensor.dtype]
    shape = tuple(tensor.shape) if constant else ("T", *tensor.shape[1:])
    return Operand(name, shape, dtype, constant)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("heads", "head_dim", "rotary_dim", "interleaved", "concat_halves"),
    [
        (3, 64, 64, False, False),
        (9, 80, 32, False, False),
        (2, 64, 24, True, False),
        (5, 64, 64, True, True),
        (1, 96, 96, False, True),
        (20, 128, 128, False, False),
    ],
)
@pytest.mark.parametrize(("source", "stored"), [("f32", "bf16"), ("bf16", "f32"), ("f16", "f16")])
def test_rope_rotates_as_the_reference(
    heads: int,
    head_dim: int,
    rotary_dim: int,
    interleaved: bool,
    concat_halves: bool,
    source: str,
    stored: str,
) -> None:
    step = Case(SEQUENCES, 1, 64, 64).build()
    x = step.rows(heads * head_dim, source, margin=8)
    cos, sin = tables(step, rotary_dim)
    y = torch.full(x.shape, float("nan"), dtype=TORCH[stored])
    attrs = {
        "heads": heads,
        "head_dim": head_dim,
        "rotary_dim": rotary_dim,
        "interleaved": interleaved,
        "concat_halves": concat_halves,
    }
    operands = (
        operand("x", x),
        operand("positions", step.inputs["positions"]),
        operand("cos", cos, constant=True),
        operand("sin", sin, constant=True),
    )
    values = {"x": x, "y": y, "positions": step.inputs["positions"]}
    step.run(ROPE, Op("castiron.PagedRope", operands, (operand("y", y),), attrs), values, [cos, sin])
    assert ROPE.reference is not None
    (expected,) = ROPE.reference(
        x.double().numpy(), step.inputs["positions"].numpy(), cos.numpy(), sin.numpy(), **attrs
    )
    np.testing.assert_allclose(y.double().numpy(), expected, atol=4 * TOLERANCES[stored], rtol=0)


@pytest.mark.parametrize("half", ["bf16", "f16", "f32"])
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim", "v_head_dim", "rotary_dim"),
    [(6, 2, 64, 64, 64), (3, 3, 96, 40, 32), (17, 17, 32, 32, 32)],
)
def test_rope_write_kv_stores_by_slot_and_leaves_the_rest_alone(
    q_heads: int, kv_heads: int, head_dim: int, v_head_dim: int, rotary_dim: int, half: str
) -> None:
    step = Case(SEQUENCES, kv_heads, head_dim, v_head_dim, half=half, filled=False).build()
    q, k = (step.rows(heads * head_dim, "f32", margin=4) for heads in (q_heads, kv_heads))
    v = step.rows(kv_heads * v_head_dim, half)
    cos, sin = tables(step, rotary_dim)
    y = torch.full(q.shape, float("nan"), dtype=TORCH[half])
    attrs = {
        "layer": 1,
        "q_heads": q_heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "v_head_dim": v_head_dim,
        "rotary_dim": rotary_dim,
        "interleaved": False,
        "concat_halves": False,
    }
    positions = step.inputs["positions"]
    operands = (
        operand("q", q),
        operand("k", k),
        operand("v", v),
        operand("positions", positions),
        operand("cos", cos, constant=True),
        operand("sin", sin, constant=True),
    )
    expected = step.reference()
    assert ROPE_WRITE_KV.reference is not None
    (rotated,) = ROPE_WRITE_KV.reference(
        *(t.double().numpy() for t in (q, k, v)),
        positions.numpy(),
        cos.numpy(),
        sin.numpy(),
        step=expected,
        **attrs,
    )
    values = {"q": q, "k": k, "v": v, "y": y, "positions": positions}
    op = Op("castiron.RopeWriteKV", operands, (operand("y", y),), attrs)
    step.run(ROPE_WRITE_KV, op, values, [cos, sin])
    np.testing.assert_allclose(y.double().numpy(), rotated, atol=4 * TOLERANCES[half], rtol=0)
    # NaN equals NaN: slots of -1 and of other tokens are untouched.
    for name, part in (("k_cache", expected.k), ("v_cache", expected.v)):
        stored = step.views[name].double().numpy()
        np.testing.assert_allclose(stored, part, atol=4 * TOLERANCES[half], rtol=0)


@pytest.mark.parametrize(("cache", "target"), [("i8", "sm_80"), ("f8e4m3", "sm_90"), ("f8e4m3", "sm_80")])
@pytest.mark.parametrize("interleaved", [False, True])
def test_caches_of_codes_round_by_the_scales_of_heads(cache: str, target: str, interleaved: bool) -> None:
    step = Case(SEQUENCES, 3, 48, 40, target=target, filled=False, cache=cache).build()
    q, k, v = (step.rows(width, "f32") for width in (6 * 48, 3 * 48, 3 * 40))
    cos, sin = tables(step, 32)
    y = torch.full(q.shape, float("nan"), dtype=torch.bfloat16)
    attrs = {
        "layer": 1,
        "q_heads": 6,
        "kv_heads": 3,
        "head_dim": 48,
        "v_head_dim": 40,
        "rotary_dim": 32,
        "interleaved": interleaved,
        "concat_halves": False,
        **step.rounding,
    }
    positions = step.inputs["positions"]
    named = {"q": q, "k": k, "v": v, "positions": positions}
    operands = (
        *(operand(name, tensor) for name, tensor in named.items()),
        operand("cos", cos, constant=True),
        operand("sin", sin, constant=True),
    )
    expected = step.reference()
    assert ROPE_WRITE_KV.reference is not None
    arrays = [t.double().numpy() for t in (q, k, v)]
    tables_ = (positions.numpy(), cos.numpy(), sin.numpy())
    ROPE_WRITE_KV.reference(*arrays, *tables_, step=expected, **attrs)
    op = Op("castiron.RopeWriteKV", operands, (operand("y", y),), attrs)
    step.run(ROPE_WRITE_KV, op, {**named, "y": y}, [cos, sin])
    for name, part in (("k_cache", expected.k), ("v_cache", expected.v)):
        found = step.views[name].double().numpy()
        # A rotation in float32 instead of float64 may fall on the other side of a middle: a code's step.
        assert np.isclose(found, part, rtol=0.13, atol=1.01, equal_nan=True).all()
        assert (found != part)[~np.isnan(part)].mean() < 0.01
        assert len(np.unique(found[~np.isnan(found)])) > 50


def test_write_kv_stores_views_of_a_fused_projection() -> None:
    step = Case(SEQUENCES, 3, 80, 48, filled=False).build()
    k, v = step.rows(3 * 80, "bf16", margin=16), step.rows(3 * 48, "f32", margin=2)
    attrs = {"layer": 1, "kv_heads": 3, "head_dim": 80, "v_head_dim": 48}
    expected = step.reference()
    assert WRITE_KV.reference is not None
    WRITE_KV.reference(k.double().numpy(), v.double().numpy(), step=expected, **attrs)
    op = Op("castiron.WriteKV", (operand("k", k), operand("v", v)), (), attrs)
    step.run(WRITE_KV, op, {"k": k, "v": v})
    np.testing.assert_array_equal(step.views["k_cache"].double().numpy(), expected.k)
    rounded = torch.from_numpy(expected.v).to(torch.bfloat16).double().numpy()
    np.testing.assert_array_equal(step.views["v_cache"].double().numpy(), rounded)
