"""A quantization plan in the graph: rounded weights, rounded activations, scales that fold away."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from castiron.graph.evaluate import GraphEvaluator
from castiron.graph.passes import PassContext, run_passes
from castiron.graph.quant_plan import CacheScales, LinearPlan, QuantPlan
from castiron.graph.weights import WeightGraph
from hand_built import llama
from quant_plans import TensorFile, largest_scales, plan_of, rounded, weights_of

from castiron.errors import BuildError

TOKENS = [3, 7, 1, 50, 22, 9, 9, 0]
#: float32 sums in another order, on logits of about 1.
TOLERANCE = 5e-6
CTX = PassContext(max_seq_len=64)


def products(model: onnx.ModelProto) -> list[str]:
    """Weights of the captured graph's Linears."""
    return [n.input[1] for n in model.graph.node if n.op_type == "Linear"]


def with_plan(model: onnx.ModelProto, plan: QuantPlan) -> onnx.ModelProto:
    return run_passes(model, replace(CTX, quantization=plan))[0]


@pytest.mark.parametrize(
    ("format", "group"), [("int8", 0), ("int4", 16), ("int4", 7), ("fp8", 0), ("fp4", 16)]
)
def test_the_logits_are_those_of_the_rounded_weights(tmp_path: Path, format: str, group: int) -> None:
    model = llama(tmp_path / "w.bin", tied=False, bias=True)
    plan, after = plan_of(weights_of(model), products(model), tmp_path / "s.bin", format, group)
    expected = GraphEvaluator(model, {k: v.astype(np.float32) for k, v in after.items()}).run(TOKENS)
    actual = GraphEvaluator(with_plan(model, plan)).run(TOKENS)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE)
    plain = GraphEvaluator(model).run(TOKENS)
    assert np.abs(actual - plain).max() > 100 * TOLERANCE, "rounding must have changed something"


def test_a_fused_projection_is_still_seen_as_codes(tmp_path: Path) -> None:
    model = llama(tmp_path / "w.bin")
    plan, _ = plan_of(weights_of(model), products(model), tmp_path / "s.bin", "int4", 16)
    after = with_plan(model, plan)
    graph = WeightGraph(after)
    linears = [n for n in after.graph.node if n.op_type in ("Linear", "GatedLinear")]
    assert linears
    for node in linears:
        for weight in node.input[1 : 3 if node.op_type == "GatedLinear" else 2]:
            parts = graph.expr(weight).parts()
            assert parts is not None
            assert (parts.format, parts.group) == ("int4", 16)
            np.testing.assert_array_equal(
                np.rint(
                    graph.expr(weight).whole()
                    / np.repeat(parts.scale.whole(), 16, 1)[:, : parts.codes.shape[1]]
                ),
                parts.codes.whole(),
            )


def test_an_input_scale_that_every_reader_shares_moves_into_the_norm(tmp_path: Path) -> None:
    model = llama(tmp_path / "w.bin", layers=1, bias=True, tied=False)
    weights = weights_of(model)
    rng = np.random.default_rng(5)
    tensors = TensorFile(tmp_path / "s.bin")
    linears: dict[str, LinearPlan] = {}
    shared: dict[str, object] = {}
    changed = {}
    for node in model.graph.node:
        if node.op_type != "Linear":
            continue
        name, x = node.input[1], node.input[0]
        if x not in shared:
            factor = rng.uniform(0.5, 2, weights[name].shape[1]).astype(np.float32)
            shared[x] = (factor, tensors.add(f"{x}.factor", factor))
        factor, ref = shared[x]  # type: ignore[misc]
        scaled = weights[name] / factor
        scale = largest_scales(scaled, "int8", 0)
        linears[name] = LinearPlan("int8", 0, tensors.add(f"{name}.s", scale), input_scale=ref)  # type: ignore[arg-type]
        changed[name] = (rounded(scaled, scale, "int8", 0) * factor).astype(np.float32)
    after = with_plan(model, QuantPlan(linears))
    np.testing.assert_allclose(
        GraphEvaluator(after).run(TOKENS),
        GraphEvaluator(model, changed).run(TOKENS),
        rtol=0,
        atol=TOLERANCE,
    )
    constants = {t.name for t in after.graph.initializer}
    for node in after.graph.node:
        if all(name in constants for name in node.input):
            constants.update(node.output)
    run_time = [n for n in after.graph.node if n.op_type == "Mul" and not constants.issuperset(n.input)]
    # Behind attention and behind the gated product there is no norm to take the scale.
    assert len(run_time) == 2


def test_output_scales_need_no_work_at_run_time(tmp_path: Path) -> None:
    """up_proj's rows are multiplied, down_proj's columns divided: the same function."""
    model = llama(tmp_path / "w.bin", layers=1, bias=True)
    weights = weights_of(model)
    up = next(n for n in weights if "up" in n and n.endswith("weight"))
    down = next(n for n in weights if "down" in n and n.endswith("weight"))
    factor = np.random.default_rng(2).uniform(0.5, 2, weights[up].shape[0]).astype(np.float32)
    tensors = TensorFile(tmp_path / "s.bin")
    ref = tensors.add("factor", factor)
    up_w, down_w = weights[up] * factor[:, None], weights[down] / factor
    gate = next(n for n in weights if "gate" in n and n.endswith("weight"))
    linears = {
        # Joined with up_proj, so held as it is
        gate: LinearPlan("int8", 0, tensors.add("g", largest_scales(weights[gate], "int8", 0))),
        up: LinearPlan("int8", 0, tensors.add("u", largest_scales(up_w, "int8", 0)), output_scale=ref),
        down: LinearPlan(
            "int8",
            0,
            tensors.add("d", largest_scales(down_w, "int8", 0)),
            input_scale=ref,
            input_is_scaled=True,
        ),
    }
    after = with_plan(model, QuantPlan(linears))
    exact = GraphEvaluator(model).run(TOKENS)
    found = GraphEvaluator(after).run(TOKENS)
    # int8 with a scale a row loses less than 1/254 of the largest weight of a row
    np.testing.assert_allclose(found, exact, rtol=0, atol=0.02 * np.abs(exact).max())
    assert len([n for n in after.graph.node if n.op_type == "GatedLinear"]) == 1


def test_products_that_round_their_x_differently_are_not_joined(tmp_path: Path) -> None:
    model = llama(tmp_path / "w.bin", layers=1)
    names = [name for name in products(model) if any(part in name for part in ("q", "k", "v"))]
    linears = {names[0]: LinearPlan(x_format="int8"), names[1]: LinearPlan(x_format="fp8")}
    after = with_plan(model, QuantPlan(linears))
    alike = with_plan(
        model, QuantPlan(dict.fromkeys(products(model), LinearPlan(x_format="int8", x_scale=0.25)))
    )

    def count(m: onnx.ModelProto) -> int:
        return sum(n.op_type == "Linear" for n in m.graph.node)

    assert count(after) > count(alike)
    assert all(
        {a.name for a in n.attribute} >= {"x_format", "x_group", "x_scale"}
        for n in alike.graph.node
        if n.op_type in ("Linear", "GatedLinear")
    )


def test_a_rounded_cache_changes_what_attention_sees(tmp_path: Path) -> None:
    model = llama(tmp_path / "w.bin", layers=1)
    before = GraphEvaluator(run_passes(model, CTX)[0])
    heads = next(
        a.i
        for n in run_passes(model, CTX)[0].graph.node
        if n.op_type == "RopeWriteKV"
        for a in n.attribute
        if a.name == "kv_heads"
    )
    scales = CacheScales((0.02,) * heads, (0.01,) * heads)
    after = with_plan(model, QuantPlan(kv_format="int8", kv_scales={0: scales}))
    exact, found = before.run(TOKENS), GraphEvaluator(after).run(TOKENS)
    assert 0 < np.abs(found - exact).max() < 0.05 * np.abs(exact).max()


def test_a_plan_that_does_not_fit_the_model_is_refused(tmp_path: Path) -> None:
    model = llama(tmp_path / "w.bin", layers=1)
    name = products(model)[0]
    tensors = TensorFile(tmp_path / "s.bin")
    with pytest.raises(BuildError, match=r"names 1 weights that no product of the graph reads: nowhere"):
        with_plan(model, QuantPlan({"nowhere": LinearPlan(x_format="int8")}))
    wrong = LinearPlan("int8", 0, tensors.add("s", np.ones((3, 1), np.float32)))
    with pytest.raises(BuildError, match=r"has scale of shape \[3, 1\]; expected"):
        with_plan(model, QuantPlan({name: wrong}))
    with pytest.raises(BuildError, match=r"has 2 heads; found 1 scales|has \d+ heads; found 1 scales"):
        with_plan(model, QuantPlan(kv_format="fp8", kv_scales={0: CacheScales((1.0,), (1.0,))}))
