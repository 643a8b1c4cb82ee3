"""Plugins' patterns become ops of their own domain, checked by their definitions, with the same meaning."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from castiron.graph import capture
from castiron.graph.checkpoint import Checkpoint
from castiron.graph.custom import CustomOp, ModuleTakeover, Pattern, check_custom_ops
from castiron.graph.evaluate import GraphEvaluator
from castiron.graph.passes import PassContext, run_passes
from hand_built import llama
from zoo import make_checkpoint

from castiron.errors import BuildError, UnsupportedModelError

TOKENS = [3, 7, 1, 50, 22, 9, 9, 0]


def silu_mul(gate: Any, up: Any) -> Any:
    return gate / (1 + np.exp(-gate)) * up


OP = CustomOp("demo.SiluMul", ("gate", "up"), lambda gate, up: [gate], silu_mul)
PATTERN = Pattern(
    "silu-mul",
    lambda op, gate, up: op.Mul(op.Activation(gate, fn="silu", _domain="castiron"), up),
    lambda op, gate, up: op.SiluMul(gate, up, _domain="demo"),
)


def rewritten(model: onnx.ModelProto, *patterns: Pattern) -> onnx.ModelProto:
    return run_passes(model, PassContext(64, patterns))[0]


def test_every_match_becomes_the_plugins_op_and_the_logits_stay(tmp_path: Path) -> None:
    model = llama(tmp_path / "w.bin", tied=True, bias=False)
    after = rewritten(model, PATTERN)
    found = [node for node in after.graph.node if node.domain == "demo"]
    assert len(found) == sum(node.op_type == "Activation" for node in model.graph.node) > 0
    assert not any(node.op_type == "GatedLinear" for node in after.graph.node)
    check_custom_ops(after, {OP.name: OP})
    expected = GraphEvaluator(model).run(TOKENS)
    np.testing.assert_allclose(GraphEvaluator(after, custom=[OP]).run(TOKENS), expected, rtol=0, atol=2e-6)


def test_the_weights_stay_references_to_the_checkpoint(tmp_path: Path) -> None:
    model = llama(tmp_path / "w.bin", tied=True, bias=False)
    external = {t.name for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL}
    after = rewritten(model, PATTERN)
    kept = {t.name for t in after.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL}
    assert kept == external


def test_a_pattern_that_matches_nothing_is_an_error(tmp_path: Path) -> None:
    nothing = Pattern("never", lambda op, x: op.Tan(x), lambda op, x: op.Sin(x))
    with pytest.raises(BuildError, match=r"'never' matches nothing.*--dump-graph"):
        rewritten(llama(tmp_path / "w.bin", tied=True, bias=False), nothing)


def test_a_pattern_that_raises_is_named(tmp_path: Path) -> None:
    def explode(op: Any, gate: Any, up: Any) -> Any:
        raise RuntimeError("no idea")

    broken = Pattern("broken", PATTERN.match, explode)
    with pytest.raises(BuildError, match=r"'broken' failed: RuntimeError.*no idea"):
        rewritten(llama(tmp_path / "w.bin", tied=True, bias=False), broken)


def test_a_wrong_shape_rule_is_told_with_both_shapes(tmp_path: Path) -> None:
    after = rewritten(llama(tmp_path / "w.bin", tied=True, bias=False), PATTERN)
    wrong = CustomOp(OP.name, OP.inputs, lambda gate, up: [(gate[0], 2 * gate[1])], silu_mul)
    with pytest.raises(BuildError, match=r"demo.SiluMul on .* gives .* but what it replaces has"):
        check_custom_ops(after, {OP.name: wrong})


def test_an_op_that_no_plugin_defines_is_refused(tmp_path: Path) -> None:
    after = rewritten(llama(tmp_path / "w.bin", tied=True, bias=False), PATTERN)
    with pytest.raises(BuildError, match=r"no plugin defines demo.SiluMul"):
        check_custom_ops(after, {})


@pytest.mark.parametrize("name", ["SiluMul", "castiron.Mine", "demo.", ".x", "demo.not-a-name"])
def test_an_op_needs_a_domain_of_its_own(name: str) -> None:
    with pytest.raises(BuildError, match=r"expected 'domain.Op'"):
        CustomOp(name, ("x",), lambda x: [x], lambda x: x)


def swiglu(x: Any, gate: Any, up: Any, down: Any) -> Any:
    g = x @ gate.T
    return (g / (1 + np.exp(-g)) * (x @ up.T)) @ down.T


MLP = CustomOp("demo.Mlp", ("x", "gate", "up", "down"), lambda x, gate, up, down: [(x[0], down[0])], swiglu)
TAKEOVER = ModuleTakeover(
    "transformers.models.llama.modeling_llama.LlamaMLP",
    MLP,
    weights=("gate_proj.weight", "up_proj.weight", "down_proj.weight"),
)


def test_a_module_that_a_plugin_takes_over_becomes_its_op_on_packed_rows(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    with Checkpoint.open(tmp_path) as checkpoint:
        captured = capture(checkpoint, takeovers=[TAKEOVER])
        plain = capture(checkpoint)
    assert captured.report.replaced["LlamaMLP"] == "demo.Mlp"
    after = rewritten(captured.model)
    check_custom_ops(after, {MLP.name: MLP})
    found = [node for node in after.graph.node if node.op_type == "Mlp"]
    assert len(found) == len(plain.layers)
    expected = GraphEvaluator(plain.model).run(TOKENS)
    np.testing.assert_allclose(
        GraphEvaluator(after, custom=[MLP]).run(TOKENS), expected, rtol=0, atol=1e-4 * np.abs(expected).max()
    )


def test_a_takeover_whose_reference_is_not_the_module_is_refused(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    wrong = replace(TAKEOVER, op=replace(MLP, reference=lambda *operands: -swiglu(*operands)))
    with (
        Checkpoint.open(tmp_path) as checkpoint,
        pytest.raises(UnsupportedModelError, match="differs from the source model"),
    ):
        capture(checkpoint, takeovers=[wrong])


def test_a_takeover_of_a_class_that_the_model_lacks_names_those_that_it_has(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    other = replace(TAKEOVER, module="transformers.models.gemma.modeling_gemma.GemmaMLP")
    with (
        Checkpoint.open(tmp_path) as checkpoint,
        pytest.raises(BuildError, match=r"GemmaMLP, which this model does not have.*LlamaMLP"),
    ):
        capture(checkpoint, takeovers=[other])
