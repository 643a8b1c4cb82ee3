"""Tactics of quantized products on host: which kernel, and what becomes of its input."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from castiron.engines.program import Limits
from castiron.plugins.host.linear import TACTICS as DENSE
from castiron.plugins.host.quantized import TACTICS as QUANTIZED
from castiron.plugins.tactic import Call, Context, Op, Operand, Quant
from castiron.plugins.targets import TARGETS

LIMITS = Limits(max_batch_size=4, max_num_tokens=64, max_logit_rows=4, max_seq_len=128)
CONTEXT = Context(TARGETS["host"], "bf16", LIMITS)
INT8 = Quant("int8", 0)
INT4 = Quant("int4", 32, "f16", has_offset=True, columns=tuple(range(64)))


def product(quant: Quant | None, bias: bool = False, **attrs: Any) -> Op:
    w = Operand("w", (48, 64), constant=True, quant=quant)
    b = Operand("b", (48,), constant=True) if bias else None
    return Op("castiron.Linear", (Operand("x", ("T", 64)), w, b), (Operand("y", ("T", 48)),), attrs)


def calls(op: Op, context: Context = CONTEXT) -> list[Call]:
    fitting = [t for t in (*QUANTIZED, *DENSE) if t.kind == op.kind and t.accepts(op, context)]
    best = min(fitting, key=lambda tactic: tactic.cost(op, context, 64))
    return [action for action in best.lower(op, context).actions if isinstance(action, Call)]


def test_codes_scales_offsets_columns_and_bias_follow_each_other() -> None:
    (call,) = calls(product(INT4, bias=True))
    assert call.kernel == "quantized_linear"
    assert [use.role for use in call.weights] == ["codes", "scales", "offsets", "columns", "vector"]
    assert call.attrs["group"] == 32
    assert call.attrs["has_offsets"]
    assert call.attrs["has_columns"]


@pytest.mark.parametrize(
    ("quant", "expected"),
    [
        (INT8, {"x_format": "int8", "x_group": 32}),
        (Quant("int4", 128), {"x_format": "int8", "x_group": 32}),
        (Quant("fp4", 16), {"x_format": "int8", "x_group": 32}),
        (Quant("int4", 24), {"x_format": "float"}),
        (Quant("fp8", 0), {"x_format": "float"}),
    ],
)
def test_inputs_of_products_with_quantized_weights_alone_become_int8_where_integers_multiply(
    quant: Quant, expected: dict[str, Any]
) -> None:
    (call,) = calls(product(quant))
    assert {name: call.attrs[name] for name in expected} == expected
    full, f32 = replace(CONTEXT, activations="full"), replace(CONTEXT, half="f32")
    assert calls(product(quant), full)[0].attrs["x_format"] == "float"
    assert calls(product(quant), f32)[0].attrs["x_format"] == "float"


def test_a_declared_rounding_is_kept_but_in_float32() -> None:
    op = product(INT8, x_format="int8", x_group=0, x_scale=0.25)
    full = replace(CONTEXT, activations="full")
    for context in (CONTEXT, full):
        attrs = calls(op, context)[0].attrs
        assert (attrs["x_format"], attrs["x_group"], attrs["x_scale"]) == ("int8", 0, 0.25)
    assert calls(op, replace(CONTEXT, half="f32"))[0].attrs["x_format"] == "float"


def test_a_dense_product_rounds_its_input_before() -> None:
    rounding, linear = calls(product(None, x_format="fp8"))
    assert (rounding.kernel, rounding.attrs["x_format"]) == ("round", "fp8")
    assert linear.inputs == list(rounding.outputs)
    assert linear.kernel == "linear"
    (alone,) = calls(product(None, x_format="fp8"), replace(CONTEXT, half="f32"))
    assert alone.inputs == ["x"]


@pytest.mark.parametrize("up", [INT4, replace(INT4, group=64)])
def test_gate_and_up_join_only_when_quantized_alike(up: Quant) -> None:
    matrices = [Operand(name, (48, 64), constant=True, quant=q) for name, q in (("gate", INT4), ("up", up))]
    op = Op(
        "castiron.GatedLinear",
        (Operand("x", ("T", 64)), *matrices),
        (Operand("y", ("T", 48)),),
        {"activation": "silu"},
    )
    (call,) = calls(op)
    assert call.kernel == ("quantized_gated_linear" if up == INT4 else "gated_linear")
