"""Lowering, checked by running the program in numpy on its planned arena and packed weights."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from castiron.build.lower import lower
from castiron.engines.kernels import KERNELS, attr_fits
from castiron.engines.program import Limits, Program
from castiron.graph.evaluate import GraphEvaluator
from castiron.graph.passes import PassContext, run_passes
from castiron.plugins import Call, Context, Lowering, Op, Tactic, default_registry

from castiron.errors import BuildError

sys.path.insert(0, str(Path(__file__).parents[1] / "graph"))
from hand_built import GraphBuilder, llama
from program_interpreter import Interpreter

LIMITS = Limits(max_batch_size=4, max_num_tokens=32, max_logit_rows=16, max_seq_len=64)
#: Sums of some dozens of float32 products, twice: an independent order of summation.
TOLERANCE = 5e-6


def rewritten(model: onnx.ModelProto) -> onnx.ModelProto:
    return run_passes(model, PassContext(LIMITS.max_seq_len))[0]


def kernels(program: Program) -> list[str]:
    return [step.kernel for step in program.steps]


def check_against_graph(
    model: onnx.ModelProto, after: onnx.ModelProto, vocab: int, dtype: str = "float32"
) -> None:
    """Chunked prefill and decode: the program's logits are the captured graph's."""
    lowered = lower(after, "host", LIMITS, "float32")
    program, graph = Interpreter(lowered.program, lowered.sources), GraphEvaluator(model)
    rng = np.random.default_rng(1)
    for count, rows in ((13, None), (1, None), (3, [1, 2]), (17, [16])):
        tokens = rng.integers(0, vocab, count)
        expected = graph.run(tokens, logit_rows=rows)
        actual = program.run(tokens, rows)
        np.testing.assert_allclose(
            actual, expected, rtol=0, atol=TOLERANCE * max(1.0, np.abs(expected).max())
        )


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
def test_a_llama_program_computes_what_its_graph_does(tmp_path: Path, bias: bool) -> None:
    model = llama(tmp_path / "w.bin", bias=bias)
    check_against_graph(model, rewritten(model), 61)


def test_the_captured_graph_lowers_without_any_fusion_where_passes_cannot_help(tmp_path: Path) -> None:
    """Reshape, Transpose, Softmax, MatMul, Concat, Slice, ReduceMean, Clip ... on [H, T, D] values."""
    g = GraphBuilder(tmp_path / "w.bin")
    ids = g.op("Unsqueeze", ["token_ids", g.const([0])], [1, "T"], dtype=onnx.TensorProto.INT64)
    x = g.op("Gather", [g.weight("embed", 61, 24), ids], [1, "T", 24], axis=0)
    h = g.split_heads(g.linear(x, "a", [1, "T"], 24, 24), 3, 8)
    h = g.op("Softmax", [h], [1, 3, "T", 8], axis=-1)
    swapped = g.op("Transpose", [h], [1, "T", 8, 3], perm=[0, 2, 3, 1])
    gram = g.op(
        "MatMul", [swapped, g.op("Transpose", [h], [1, "T", 3, 8], perm=[0, 2, 1, 3])], [1, "T", 8, 8]
    )
    mean = g.op("ReduceMean", [gram, g.const([-1])], [1, "T", 8, 1], keepdims=1)
    wide = g.op("Expand", [mean, g.const([1, 1, 8, 3])], [1, "T", 8, 3])
    wide = g.op("Reshape", [wide, g.const([1, -1, 24])], [1, "T", 24])
    part = g.op("Slice", [x, g.const([3]), g.const([21]), g.const([2]), g.const([2])], [1, "T", 9])
    part = g.op("Clip", [part, g.const(-0.2, np.float32), g.const(0.2, np.float32)], [1, "T", 9])
    part = g.op("Concat", [part, g.op("Exp", [part], [1, "T", 9])], [1, "T", 18], axis=-1)
    rest = g.op("Slice", [wide, g.const([0]), g.const([6]), g.const([2]), g.const([1])], [1, "T", 6])
    x = g.op("Concat", [part, rest], [1, "T", 24], axis=2)
    x = g.op("Sub", [g.const(np.full((1, 1, 24), 0.5), np.float32), x], [1, "T", 24])
    x = g.op("Pow", [x, g.const(2.0, np.float32)], [1, "T", 24])
    x = g.op("Div", [x, g.op("Sqrt", [g.op("Abs", [x], [1, "T", 24])], [1, "T", 24])], [1, "T", 24])
    x = g.op("Gather", [x, "logit_rows"], [1, "N", 24], axis=1)
    x = g.op("Linear", [x, g.weight("head", 61, 24)], [1, "N", 61], domain="castiron")
    g.op("Squeeze", [x, g.const([0])], ["N", 61], name="logits")
    model = g.model(61)
    check_against_graph(model, rewritten(model), 61)


def test_a_layer_is_eight_steps_and_its_slices_are_views(tmp_path: Path) -> None:
    lowered = lower(rewritten(llama(tmp_path / "w.bin", layers=2)), "host", LIMITS, "bfloat16")
    layer = [
        "rms_norm",
        "linear",
        "rope_write_kv",
        "paged_attention",
        "linear",
        "rms_norm",
        "gated_linear",
        "linear",
    ]
    assert kernels(lowered.program)[:9] == ["embedding", *layer]
    qkv = lowered.program.steps[2].outputs[0]
    views = [v for v in lowered.program.values if v.base == qkv]
    assert [(v.column, v.shape[1]) for v in views] == [(0, 32), (32, 16), (48, 16)]
    assert lowered.program.steps[3].inputs[:3] == [v.name for v in views]
    assert [step.attrs["has_residual"] for step in lowered.program.steps if step.kernel == "linear"][:3] == [
        False,
        True,
        True,
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tied_embedding_is_stored_once_in_the_projections_layout(tmp_path: Path, dtype: str) -> None:
    def of(tied: bool) -> Program:
        return lower(rewritten(llama(tmp_path / "w.bin", tied=tied)), "host", LIMITS, dtype).program

    tied, untied = of(True), of(False)
    assert tied.steps[0].weights == tied.steps[-1].weights == ["model.embed_tokens.weight"]
    assert len(untied.weights) == len(tied.weights) + 1
    layouts = {w.name: w.layout for w in untied.weights}
    panel = {"float32": "panel16", "bfloat16": "panel16x2"}[dtype]
    assert layouts["model.embed_tokens.weight"] == "plain"
    assert layouts["lm_head.weight"] == panel
    assert {w.layout for w in tied.weights if w.name == "model.embed_tokens.weight"} == {panel}


def test_vectors_and_tables_stay_float32_and_matrices_follow_the_build(tmp_path: Path) -> None:
    program = lower(rewritten(llama(tmp_path / "w.bin", bias=True)), "host", LIMITS, "bfloat16").program
    for weight in program.weights:
        matrix = len(weight.shape) == 2 and "table" not in weight.name
        assert weight.dtype == ("bf16" if matrix else "f32"), weight.name
    assert {layer.dtype for layer in program.kv_layers} == {"bf16"}


def test_bfloat16_differs_from_float32_by_its_rounding_only(tmp_path: Path) -> None:
    after = rewritten(llama(tmp_path / "w.bin"))
    outputs = []
    for dtype in ("float32", "bfloat16"):
        lowered = lower(after, "host", LIMITS, dtype)
        outputs.append(Interpreter(lowered.program, lowered.sources).run([3, 1, 4, 1, 5]))
    error = np.abs(outputs[0] - outputs[1]).max()
    assert 0 < error < 0.02 * np.abs(outputs[0]).max()


def test_residual_adds_work_in_place_of_the_stream(tmp_path: Path) -> None:
    program = lower(rewritten(llama(tmp_path / "w.bin", layers=2)), "host", LIMITS, "float32").program
    offsets = {v.name: v.offset for v in program.values}
    first = next(s for s in program.steps if s.kernel == "linear" and s.attrs["has_residual"])
    assert offsets[first.outputs[0]] == offsets[first.inputs[1]]


def test_every_step_fits_the_readers_table_of_kernels(tmp_path: Path) -> None:
    program = lower(rewritten(llama(tmp_path / "w.bin", bias=True)), "host", LIMITS, "float32").program
    for step in program.steps:
        kernel = KERNELS[step.kernel]
        for names, (least, most) in ((step.inputs, kernel.inputs), (step.weights, kernel.weights)):
            assert least <= len(names) <= most
        assert set(step.attrs) == set(kernel.attrs)
        assert all(attr_fits(value, kernel.attrs[name]) for name, value in step.attrs.items())


def test_an_op_without_a_tactic_is_named_with_its_operands(tmp_path: Path) -> None:
    g = GraphBuilder(tmp_path / "w.bin")
    x = g.op("Gather", [g.weight("embed", 61, 24), "token_ids"], ["T", 24], axis=0)
    x = g.op("CumSum", [x, g.const(0)], ["T", 24])
    x = g.op("Gather", [x, "logit_rows"], ["N", 24], axis=0)
    g.op("Linear", [x, g.weight("head", 61, 24)], ["N", 61], domain="castiron", name="logits")
    with pytest.raises(BuildError, match=r"'host' cannot run CumSum\(\['T', 24\]"):
        lower(rewritten(g.model(61)), "host", LIMITS, "float32")


def test_a_position_table_that_is_too_short_is_refused(tmp_path: Path) -> None:
    g = GraphBuilder(tmp_path / "w.bin")
    x = g.op("Gather", [g.weight("wpe", 40, 24), "positions"], ["T", 24], axis=0)
    x = g.op("Gather", [x, "logit_rows"], ["N", 24], axis=0)
    g.op("Linear", [x, g.weight("head", 61, 24)], ["N", 61], domain="castiron", name="logits")
    with pytest.raises(BuildError, match="--max-seq-len 40 or less"):
        lower(rewritten(g.model(61)), "host", LIMITS, "float32")


def test_unknown_targets_and_dtypes_are_refused(tmp_path: Path) -> None:
    model = llama(tmp_path / "w.bin", layers=1)
    with pytest.raises(BuildError, match="unknown target 'sm_91'"):
        lower(model, "sm_91", LIMITS, "float32")
    with pytest.raises(BuildError, match="unknown dtype 'int3'"):
        lower(model, "host", LIMITS, "int3")


def test_a_users_tactic_takes_the_same_path_and_wins_at_equal_cost(tmp_path: Path) -> None:
    def doubled(op: Op, context: Context) -> Lowering:
        return Lowering((Call("unary", [op.required(0).name], [op.outputs[0].name], (), {"fn": "tanh"}),))

    registry = default_registry()
    mine = Tactic(
        "mine",
        "castiron.Activation",
        "host",
        lambda op, context: True,
        doubled,
        lambda op, context, tokens: 0.0,
    )
    registry.register(mine)
    with pytest.raises(BuildError, match="already registered"):
        registry.register(mine)
    g = GraphBuilder(tmp_path / "w.bin")
    x = g.op("Gather", [g.weight("embed", 61, 24), "token_ids"], ["T", 24], axis=0)
    x = g.op("Activation", [x], ["T", 24], domain="castiron", fn="silu")
    x = g.op("Gather", [x, "logit_rows"], ["N", 24], axis=0)
    g.op("Linear", [x, g.weight("head", 61, 24)], ["N", 61], domain="castiron", name="logits")
    lowered = lower(rewritten(g.model(61)), "host", LIMITS, "float32", registry)
    assert [d.tactic for d in lowered.decisions if d.op == "castiron.Activation"] == ["mine"]
    assert [s.attrs["fn"] for s in lowered.program.steps if s.kernel == "unary"] == ["tanh"]
