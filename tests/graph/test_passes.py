"""Every pass keeps the meaning of the graph; together they leave the fused form of docs/graph.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from castiron.graph.evaluate import GraphEvaluator
from castiron.graph.passes import PASSES, PassContext, run_passes
from castiron.graph.passes.clean_up import clean_up
from castiron.graph.passes.pipeline import Pass
from castiron.graph.passes.tabulate_positions import tabulate_positions
from hand_built import GraphBuilder, llama, rotary

from castiron.errors import BuildError

CTX = PassContext(max_seq_len=64)
TOKENS = [3, 7, 1, 50, 22, 9, 9, 0]
#: float32 sums in another order; the passes themselves move data and fold exact constants.
TOLERANCE = 2e-6


def assert_same_meaning(before: onnx.ModelProto, after: onnx.ModelProto) -> None:
    """Prefill in two pieces, then only some rows: equal logits."""
    one, two = GraphEvaluator(before), GraphEvaluator(after)
    for tokens, rows in ((TOKENS, None), ([5, 6], None), ([8, 2, 4], [0, 2]), ([1], [0])):
        expected = one.run(tokens, logit_rows=rows)
        np.testing.assert_allclose(two.run(tokens, logit_rows=rows), expected, rtol=0, atol=TOLERANCE)


def ops(model: onnx.ModelProto) -> list[str]:
    constants = {tensor.name for tensor in model.graph.initializer}
    listed = []
    for node in model.graph.node:
        if all(name in constants or not name for name in node.input):
            constants.update(node.output)
        else:
            listed.append(node.op_type)
    return listed


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
def test_after_each_pass_the_logits_are_those_of_the_captured_graph(
    tmp_path: Path, tied: bool, bias: bool
) -> None:
    model = llama(tmp_path / "w.bin", tied=tied, bias=bias)
    dump = tmp_path / "dump"
    after, reports = run_passes(model, CTX, dump)
    assert len(list(dump.iterdir())) == len(PASSES) + 1
    assert [report.name for report in reports] == [rewrite.__name__ for rewrite in PASSES]
    assert_same_meaning(model, after)
    for file in sorted(dump.iterdir()):
        assert_same_meaning(model, onnx.load(file, load_external_data=False))


def test_a_llama_layer_becomes_eight_ops(tmp_path: Path) -> None:
    after, _ = run_passes(llama(tmp_path / "w.bin", layers=3), CTX)
    layer = [
        "RMSNorm",
        "Linear",
        "RopeWriteKV",
        "PagedAttention",
        "Linear",
        "RMSNorm",
        "GatedLinear",
        "Linear",
    ]
    found = [op for op in ops(after) if op != "Slice"]
    last = [*layer[:4], "GatherRows", "GatherRows", *layer[4:]]
    assert found == ["Embedding", *layer, *layer, *last, "RMSNorm", "Linear"]


def test_checkpoint_tensors_are_never_loaded(tmp_path: Path) -> None:
    model = llama(tmp_path / "w.bin")
    (tmp_path / "w.bin").unlink()
    after, _ = run_passes(model, CTX)
    external = [t for t in after.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
    assert {t.name for t in external} == {
        t.name for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL
    }
    assert not any(t.raw_data for t in external)


def test_the_rotary_table_holds_the_cosines_of_every_position(tmp_path: Path) -> None:
    after, _ = run_passes(llama(tmp_path / "w.bin"), CTX)
    tables = {t.name: onnx.numpy_helper.to_array(t) for t in after.graph.initializer if "table" in t.name}
    (cos,) = [table for name, table in tables.items() if name.startswith("cos")]
    angles = np.arange(64)[:, None] * 10000.0 ** (-np.arange(0, 8, 2) / 8)
    np.testing.assert_allclose(cos, np.cos(angles), rtol=0, atol=4e-6)  # float32 angles up to 64


def test_the_gather_moves_above_all_row_wise_ops_of_the_last_layer(tmp_path: Path) -> None:
    after, reports = run_passes(llama(tmp_path / "w.bin", layers=1), CTX)
    rows = {v.name: v.type.tensor_type.shape.dim[0].dim_param for v in after.graph.value_info}
    after_gather = [n for n in after.graph.node if n.op_type in ("GatedLinear", "RMSNorm")][1:]
    assert [rows[n.output[0]] for n in after_gather] == ["N", "N", "N"]
    assert next(r.applied for r in reports if r.name == "gather_last_tokens") == 5


# -- single passes on small graphs ---------------------------------------------------------------------------


def one_layer(tmp_path: Path, body: Callable[[GraphBuilder, str], str], width: int = 24) -> onnx.ModelProto:
    """token_ids -> embedding [1, T, width] -> body -> gather -> head."""
    g = GraphBuilder(tmp_path / "small.bin")
    ids = g.op("Unsqueeze", ["token_ids", g.const([0])], [1, "T"], dtype=onnx.TensorProto.INT64)
    x = g.op("Gather", [g.weight("embed", 61, width), ids], [1, "T", width], axis=0)
    x = body(g, x)
    x = g.op("Gather", [x, "logit_rows"], [1, "N", width], axis=1)
    x = g.op("Linear", [x, g.weight("head", 61, width)], [1, "N", 61], domain="castiron")
    g.op("Squeeze", [x, g.const([0])], ["N", 61], name="logits")
    return g.model(61)


def applied(model: onnx.ModelProto, name: str) -> tuple[onnx.ModelProto, int]:
    after, reports = run_passes(model, CTX)
    assert_same_meaning(model, after)
    return after, sum(report.applied for report in reports if report.name == name)


@pytest.mark.parametrize("gate_first", [True, False], ids=["gate_up", "up_gate"])
@pytest.mark.parametrize("joined", [True, False], ids=["one_linear", "two_linears"])
def test_gate_and_up_fuse_in_either_order_and_from_one_or_two_linears(
    tmp_path: Path, gate_first: bool, joined: bool
) -> None:
    def body(g: GraphBuilder, x: str) -> str:
        if joined:
            both = g.linear(x, "both", [1, "T"], 40, 24, bias=True)
            g.nodes.append(
                onnx.helper.make_node("Split", [both, g.const([20, 20])], ["a", "b"], "split", axis=-1)
            )
            g.infos += [onnx.helper.make_tensor_value_info(n, 1, [1, "T", 20]) for n in "ab"]
            gate, up = ("a", "b") if gate_first else ("b", "a")
        else:
            gate, up = (
                g.linear(x, "gate", [1, "T"], 20, 24, bias=True),
                g.linear(x, "up", [1, "T"], 20, 24, bias=True),
            )
        act = g.op("Activation", [gate], [1, "T", 20], domain="castiron", fn="gelu_tanh")
        pair = [act, up] if gate_first else [up, act]
        return g.linear(g.op("Mul", pair, [1, "T", 20]), "down", [1, "T"], 24, 20)

    after, count = applied(one_layer(tmp_path, body), "fuse_gate_up")
    assert count == 1
    assert Counter(ops(after))["GatedLinear"] == 1
    assert "Mul" not in ops(after)


def test_activation_scale_and_residual_become_epilogues(tmp_path: Path) -> None:
    def body(g: GraphBuilder, x: str) -> str:
        h = g.linear(x, "up", [1, "T"], 40, 24, bias=True)
        h = g.op("Activation", [h], [1, "T", 40], domain="castiron", fn="relu2")
        y = g.linear(h, "down", [1, "T"], 24, 40, bias=True)
        y = g.op("Mul", [y, g.const(0.3, np.float32)], [1, "T", 24])
        return g.op("Add", [x, y], [1, "T", 24])

    after, _ = run_passes(one_layer(tmp_path, body), CTX)
    assert_same_meaning(one_layer(tmp_path, body), after)
    assert set(ops(after)) == {"Embedding", "GatherRows", "Linear"}
    linears = [n for n in after.graph.node if n.op_type == "Linear"]
    attrs = [{a.name: onnx.helper.get_attribute_value(a) for a in n.attribute} for n in linears]
    assert attrs[0]["activation"] == b"relu2"
    assert attrs[1]["alpha"] == pytest.approx(0.3)
    assert len(linears[1].input) == 4


@pytest.mark.parametrize(("divisor", "fuses"), [(4.0, True), (3.0, False)])
def test_division_fuses_only_where_the_reciprocal_is_exact(
    tmp_path: Path, divisor: float, fuses: bool
) -> None:
    def body(g: GraphBuilder, x: str) -> str:
        y = g.linear(x, "proj", [1, "T"], 24, 24)
        return g.op("Div", [y, g.const(divisor, np.float32)], [1, "T", 24])

    after, count = applied(one_layer(tmp_path, body), "fuse_scale")
    assert count == int(fuses)
    assert ("Div" in ops(after)) is not fuses


def test_an_add_that_no_linear_takes_joins_the_norm_behind_it(tmp_path: Path) -> None:
    def norm(g: GraphBuilder, x: str, name: str) -> str:
        w = g.weight(name, 24)
        return g.op("RMSNorm", [x, w], [1, "T", 24], domain="castiron", eps=1e-6, one_plus=1)

    def body(g: GraphBuilder, x: str) -> str:
        y = norm(g, g.linear(x, "proj", [1, "T"], 24, 24), "post")
        total = g.op("Add", [x, y], [1, "T", 24])
        z = g.linear(norm(g, total, "pre"), "mlp", [1, "T"], 24, 24)
        return g.op("Add", [total, norm(g, z, "post2")], [1, "T", 24])

    after, count = applied(one_layer(tmp_path, body), "fuse_residual_norm")
    assert count == 1
    assert "AddRMSNorm" in ops(after)


def test_layer_norm_and_gelu_of_plain_onnx_become_castiron_ops(tmp_path: Path) -> None:
    def body(g: GraphBuilder, x: str) -> str:
        w, b = g.weight("ln.w", 24), g.weight("ln.b", 24)
        x = g.op("LayerNormalization", [x, w, b], [1, "T", 24], axis=-1, epsilon=1e-5)
        x = g.op("Gelu", [g.linear(x, "fc", [1, "T"], 24, 24)], [1, "T", 24], approximate="tanh")
        return g.op("Mul", [x, g.op("Sigmoid", [x], [1, "T", 24])], [1, "T", 24])

    after, count = applied(one_layer(tmp_path, body), "canonicalize")
    assert count >= 3
    assert set(ops(after)) <= {"Embedding", "GatherRows", "LayerNorm", "Linear", "Activation"}


def attention_over(g: GraphBuilder, q: str, k: str, v: str, heads: int, width: int, layer: int = 0) -> str:
    a = g.op("Attention", [q, k, v], [1, "T", heads, width], domain="castiron",
             layer=layer, scale=width**-0.5, window=3, chunk=0, softcap=0.0)  # fmt: skip
    return g.op("Reshape", [a, g.const([1, -1, heads * width])], [1, "T", heads * width])


def test_a_projection_interleaved_per_head_becomes_plain_rows(tmp_path: Path) -> None:
    """GPT-NeoX: [T, heads, 3, width]; the weight rows are rearranged instead of the activations."""

    def body(g: GraphBuilder, x: str) -> str:
        heads, width = 3, 8
        qkv = g.linear(x, "query_key_value", [1, "T"], 3 * 24, 24, bias=True)
        qkv = g.op("Reshape", [qkv, g.const([1, -1, heads, 24])], [1, "T", heads, 24])
        qkv = g.op("Transpose", [qkv], [1, heads, "T", 24], perm=[0, 2, 1, 3])
        g.nodes.append(
            onnx.helper.make_node("Split", [qkv, g.const([8, 8, 8])], ["q", "k", "v"], "split", axis=-1)
        )
        g.infos += [onnx.helper.make_tensor_value_info(n, 1, [1, heads, "T", width]) for n in "qkv"]
        return attention_over(g, "q", "k", "v", heads, width)

    after, _ = run_passes(one_layer(tmp_path, body), CTX)
    assert_same_meaning(one_layer(tmp_path, body), after)
    assert not {"Transpose", "Reshape", "Split"} & set(ops(after))
    assert Counter(ops(after))["Linear"] == 2  # qkv and the head


@pytest.mark.parametrize("early", [False, True], ids=["heads_first", "tokens_first"])
def test_partial_rotation_becomes_one_rope(tmp_path: Path, early: bool) -> None:
    def body(g: GraphBuilder, x: str) -> str:
        heads, width, turned = 3, 8, 4
        cos, sin = rotary(g, turned)

        def rotate(y: str) -> str:
            y = g.op("Reshape", [y, g.const([1, -1, heads, width])], [1, "T", heads, width])
            dims: list = [1, "T", heads]
            if not early:
                y, dims = g.op("Transpose", [y], [1, heads, "T", width], perm=[0, 2, 1, 3]), [1, heads, "T"]
            cut = [g.op("Slice", [y, g.const([a]), g.const([b]), g.const([-1]), g.const([1])], [*dims, b - a])
                   for a, b in ((0, turned), (turned, width))]  # fmt: skip
            part = cut[0]
            if early:
                part = g.op("Transpose", [part], [1, heads, "T", turned], perm=[0, 2, 1, 3])
            part = g.op("Rope", [part, cos, sin], [1, heads, "T", turned],
                        domain="castiron", style="half", cos_layout="repeat_block")  # fmt: skip
            if early:
                part = g.op("Transpose", [part], [1, "T", heads, turned], perm=[0, 2, 1, 3])
            y = g.op("Concat", [part, cut[1]], [*dims, width], axis=-1)
            return g.op("Transpose", [y], [1, heads, "T", width], perm=[0, 2, 1, 3]) if early else y

        q, k = (rotate(g.linear(x, n, [1, "T"], 24, 24)) for n in ("a.q.weight", "a.k.weight"))
        v = g.split_heads(g.linear(x, "a.v.weight", [1, "T"], 24, 24), heads, width)
        return attention_over(g, q, k, v, heads, width)

    after, count = applied(one_layer(tmp_path, body), "fold_partial_rope")
    assert count == 2
    (rope,) = [n for n in after.graph.node if n.op_type == "RopeWriteKV"]
    assert next(a.i for a in rope.attribute if a.name == "rotary_dim") == 4


def test_layers_that_share_keys_and_values_share_a_cache_layer(tmp_path: Path) -> None:
    def body(g: GraphBuilder, x: str) -> str:
        heads, width = 3, 8
        k, v = (g.split_heads(g.linear(x, f"a.{n}.weight", [1, "T"], 24, 24), heads, width) for n in "kv")
        for i in range(2):
            q = g.split_heads(g.linear(x, f"{i}.q.weight", [1, "T"], 24, 24), heads, width)
            x = g.op("Add", [x, attention_over(g, q, k, v, heads, width, i)], [1, "T", 24])
        return x

    after, count = applied(one_layer(tmp_path, body), "pack_attention")
    assert count == 2
    assert Counter(ops(after))["WriteKV"] == 1
    layers = [
        a.i
        for n in after.graph.node
        if n.op_type == "PagedAttention"
        for a in n.attribute
        if a.name == "layer"
    ]
    assert layers == [0, 0]


def test_rotation_by_something_else_than_positions_is_refused(tmp_path: Path) -> None:
    def body(g: GraphBuilder, x: str) -> str:
        cos = g.linear(x, "cos", [1, "T"], 8, 24)
        q = g.split_heads(g.linear(x, "q", [1, "T"], 24, 24), 3, 8)
        q = g.op(
            "Rope", [q, cos, cos], [1, 3, "T", 8], domain="castiron", style="half", cos_layout="repeat_block"
        )
        return attention_over(g, q, q, q, 3, 8)

    with pytest.raises(BuildError, match="positions alone"):
        run_passes(one_layer(tmp_path, body), CTX)


@pytest.mark.parametrize("rewrite", [clean_up, tabulate_positions])
def test_passes_are_idempotent(tmp_path: Path, rewrite: Pass) -> None:
    model = llama(tmp_path / "w.bin")
    once, _ = run_passes(model, CTX, passes=[rewrite])
    twice, reports = run_passes(once, CTX, passes=[rewrite])
    assert reports[0].applied == 0
    assert ops(twice) == ops(once)
