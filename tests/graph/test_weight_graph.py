"""Weight expressions, row by row, against onnx's reference evaluator on the whole graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import pytest
from castiron.build.packing import PackedSource
from castiron.graph.weights import WeightGraph
from castiron.graph.weights import exprs as weight_exprs
from castiron.graph.weights.exprs import Concat, Constant, WeightExpr
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from castiron.errors import BuildError

Array = npt.NDArray[Any]


def model_of(
    nodes: Sequence[onnx.NodeProto], initializers: dict[str, Array], outputs: Sequence[str] = ("y",)
) -> onnx.ModelProto:
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["T", 4])],
        [onnx.ValueInfoProto(name=name) for name in outputs],
        [numpy_helper.from_array(value, name) for name, value in initializers.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)])


def oracle(model: onnx.ModelProto) -> list[Array]:
    values: Any = ReferenceEvaluator(model).run(None, {"x": np.zeros((1, 4), np.float32)})
    return [np.asarray(value) for value in values]


def numbers(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def ints(*values: int) -> Array:
    return np.array(values, np.int64)


def node(op: str, inputs: Sequence[str], output: str = "y", **attrs: Any) -> onnx.NodeProto:
    return helper.make_node(op, list(inputs), [output], **attrs)


def require_equal_rows(expr: WeightExpr, expected: Array) -> None:
    assert expr.shape == expected.shape
    assert expr.dtype == expected.dtype
    np.testing.assert_array_equal(expr.whole(), expected)
    rows = expected.shape[0]
    for start in range(0, rows, 3):  # ranges that begin and end inside operands
        for stop in {min(rows, start + 1), min(rows, start + 4), rows}:
            np.testing.assert_array_equal(expr.rows(start, stop), expected[start:stop])
            # into memory with gaps between the rows, as a concatenation hands to its parts
            if expected.ndim > 1:
                wide = np.zeros((stop - start, expected.shape[1] + 2, *expected.shape[2:]), expected.dtype)
                expr.fill(start, stop, wide[:, 1:-1])
                np.testing.assert_array_equal(wide[:, 1:-1], expected[start:stop])
                assert not wide[:, 0].any()


_A, _B = numbers(8, 6, seed=1), numbers(5, 6, seed=2)
_QKV = numbers(24, 6, seed=3)
_I: dict[str, Array] = {"a": _A, "b": _B, "qkv": _QKV, "one": np.float32(1).reshape(()), "row": numbers(6)}

CASES: dict[str, tuple[list[onnx.NodeProto], dict[str, Array]]] = {
    "concat of rows": ([node("Concat", ["a", "b", "a"], axis=0)], {}),
    "concat of columns": ([node("Concat", ["a", "a"], axis=-1)], {}),
    "transpose": ([node("Transpose", ["a"], perm=[1, 0])], {}),
    "transpose without a permutation": ([node("Transpose", ["a"])], {}),
    "one plus": ([node("Add", ["a", "one"])], {}),
    "scale of each column": ([node("Mul", ["row", "a"])], {}),
    "difference and quotient": ([node("Sub", ["a", "a"], "d"), node("Div", ["d", "a"])], {}),
    "negation": ([node("Neg", ["a"])], {}),
    "an op without a rule of its own": ([node("Relu", ["a"])], {}),
    "cast": ([node("Cast", ["a"], to=TensorProto.FLOAT16)], {}),
    "slice of rows": ([node("Slice", ["a", "s", "e", "ax"])], {"s": ints(2), "e": ints(7), "ax": ints(0)}),
    "slice of columns with a step": (
        [node("Slice", ["a", "s", "e", "ax", "st"])],
        {"s": ints(1), "e": ints(6), "ax": ints(1), "st": ints(2)},
    ),
    "rows backwards": (
        [node("Slice", ["a", "s", "e", "ax", "st"])],
        {"s": ints(-1), "e": ints(-(2**62)), "ax": ints(0), "st": ints(-3)},
    ),
    "rows and columns at once": (
        [node("Slice", ["a", "s", "e", "ax"])],
        {"s": ints(1, 2), "e": ints(-1, 5), "ax": ints(0, 1)},
    ),
    "interleaved query of a fused projection": (
        [
            node("Reshape", ["qkv", "heads"], "r"),
            node("Gather", ["r", "zero"], "q", axis=1),
            node("Reshape", ["q", "flat"]),
        ],
        {"heads": ints(2, 3, -1, 6), "zero": np.array(0, np.int64), "flat": ints(-1, 6)},
    ),
    "rows in another order": ([node("Gather", ["a", "i"], axis=0)], {"i": ints(4, 5, 6, 0, -1, 2, 3)}),
    "columns in another order": ([node("Gather", ["a", "i"], axis=1)], {"i": ints(5, 0, 3)}),
    "reshape to longer rows": ([node("Reshape", ["a", "s"])], {"s": ints(0, 3, 2)}),
    "reshape across rows": ([node("Reshape", ["a", "s"])], {"s": ints(3, -1)}),
    "squeeze and unsqueeze": (
        [node("Unsqueeze", ["a", "at"], "u"), node("Squeeze", ["u", "at"])],
        {"at": ints(0, 2)},
    ),
    "flatten": ([node("Reshape", ["a", "s"], "r"), node("Flatten", ["r"], axis=1)], {"s": ints(4, 2, 6)}),
    "permutation of three axes": (
        [node("Reshape", ["a", "s"], "r"), node("Transpose", ["r"], perm=[2, 0, 1])],
        {"s": ints(4, 2, 6)},
    ),
    "a constant node": (
        [
            helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(numbers(6, seed=9))),
            node("Add", ["a", "c"]),
        ],
        {},
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("piece", [1, 100, 1 << 24])
def test_rows_equal_those_of_the_reference_evaluator(
    name: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_exprs, "PIECE_BYTES", piece)
    nodes, more = CASES[name]
    model = model_of(nodes, {**_I, **more})
    with np.errstate(all="ignore"):
        require_equal_rows(WeightGraph(model).expr("y"), oracle(model)[0])


@pytest.mark.parametrize("sizes", [None, (4, 2, 2)])
def test_split_gives_each_part(sizes: tuple[int, ...] | None) -> None:
    inputs = ["a"] if sizes is None else ["a", "sizes"]
    extra = {} if sizes is None else {"sizes": ints(*sizes)}
    attrs: dict[str, Any] = {"num_outputs": 3} if sizes is None else {}
    names = ["y0", "y1", "y2"]
    model = model_of([helper.make_node("Split", inputs, names, axis=0, **attrs)], {**_I, **extra}, names)
    graph = WeightGraph(model)
    for name, expected in zip(names, oracle(model), strict=True):
        require_equal_rows(graph.expr(name), expected)


def test_what_depends_on_an_input_is_not_a_weight() -> None:
    nodes = [
        node("Transpose", ["a"], "t", perm=[1, 0]),
        node("MatMul", ["x", "t2"], "m"),
        node("Mul", ["t", "one"], "t2"),
        node("RandomNormal", [], "noise", shape=[2]),
    ]
    nodes = [nodes[0], nodes[2], nodes[1], nodes[3]]
    foreign = helper.make_node("Linear", ["a", "a"], ["lin"], domain="castiron")
    graph = WeightGraph(model_of([*nodes, foreign], _I, ["m"]))
    assert graph.is_weight("t")
    assert graph.is_weight("t2")
    assert graph.is_weight("a")
    for name in ("m", "x", "noise", "lin", "absent"):
        assert not graph.is_weight(name)
        with pytest.raises(BuildError, match=f"'{name}' is not a weight"):
            graph.expr(name)


def external(name: str, value: Array, location: str, offset: int, length: int | None = None) -> TensorProto:
    tensor = TensorProto(name=name, data_location=TensorProto.EXTERNAL)
    tensor.data_type = helper.np_dtype_to_tensor_dtype(value.dtype)
    tensor.dims.extend(value.shape)
    for key, entry in [("location", location), ("offset", offset), ("length", length or value.nbytes)]:
        tensor.external_data.add(key=key, value=str(entry))
    return tensor


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_external_tensors_are_read_where_they_lie(tmp_path: Path, dtype: Any) -> None:
    value = numbers(9, 4).astype(dtype)
    (tmp_path / "w.bin").write_bytes(b"x" * 40 + value.tobytes() + b"y" * 8)
    model = model_of([node("Cast", ["w"], to=TensorProto.FLOAT)], {})
    model.graph.initializer.append(external("w", value, str(tmp_path / "w.bin"), 40))
    require_equal_rows(WeightGraph(model).expr("w"), value)
    require_equal_rows(WeightGraph(model).expr("y"), value.astype(np.float32))
    relative = model_of([], {}, [])
    relative.graph.initializer.append(external("w", value, "w.bin", 40))
    np.testing.assert_array_equal(WeightGraph(relative, tmp_path).value("w"), value)
    with pytest.raises(BuildError, match="expected an absolute path"):
        WeightGraph(relative).expr("w")


def test_an_external_tensor_of_the_wrong_length_is_refused(tmp_path: Path) -> None:
    model = model_of([], {}, [])
    model.graph.initializer.append(external("w", numbers(2, 2), str(tmp_path / "w.bin"), 0, 15))
    with pytest.raises(BuildError, match=r"'w'.*refers to 15 bytes, expected 16"):
        WeightGraph(model).expr("w")


def test_a_large_weight_without_a_streaming_rule_is_refused(tmp_path: Path) -> None:
    model = model_of([node("Relu", ["w"])], {})
    tensor = external("w", np.broadcast_to(np.float32(0), (20000, 5000)), str(tmp_path / "w.bin"), 0)
    model.graph.initializer.append(tensor)
    with pytest.raises(BuildError, match=r"'y' is computed by Relu from 381 MiB"):
        WeightGraph(model).expr("y")


_MOVES: list[Callable[[Array], tuple[list[onnx.NodeProto], dict[str, Array]]]] = [
    lambda v: ([node("Transpose", ["in"], "out", perm=[1, 0])], {}),
    lambda v: ([node("Concat", ["in", "in"], "out", axis=0)], {}),
    lambda v: ([node("Concat", ["in", "in"], "out", axis=1)], {}),
    lambda v: ([node("Reshape", ["in", "@s"], "out")], {"@s": ints(v.shape[1], v.shape[0])}),
    lambda v: (
        [node("Slice", ["in", "@s", "@e", "@a"], "out")],
        {"@s": ints(v.shape[0] // 3), "@e": ints(v.shape[0]), "@a": ints(0)},
    ),
    lambda v: ([node("Gather", ["in", "@i"], "out", axis=0)], {"@i": np.arange(v.shape[0])[::-1].copy()}),
]


@settings(max_examples=40, deadline=None)
@given(moves=st.lists(st.sampled_from(range(len(_MOVES))), max_size=4), rows=st.integers(1, 7))
def test_chains_of_movements_equal_the_reference_and_pack_without_a_detour_through_float32(
    moves: list[int], rows: int
) -> None:
    value: Array = numbers(rows, 4).astype(ml_dtypes.bfloat16)
    nodes = [node("Cast", ["w"], "v0", to=TensorProto.FLOAT)]
    initializers = {"w": value}
    current = value.astype(np.float32)
    for i, move in enumerate(moves):
        made, extra = _MOVES[move](current)
        for entry in made:
            names = {"in": f"v{i}", "out": f"v{i + 1}"} | {key: f"{key}{i}" for key in extra}
            inputs = [names.get(name, name) for name in entry.input]
            nodes.append(node(entry.op_type, inputs, f"v{i + 1}"))
            nodes[-1].attribute.extend(entry.attribute)
        initializers |= {f"{key}{i}": constant for key, constant in extra.items()}
        partial = model_of(nodes, initializers, [f"v{i + 1}"])
        current = oracle(partial)[0]
    expr = WeightGraph(model_of(nodes, initializers, [])).expr(f"v{len(moves)}")
    require_equal_rows(expr, current)
    narrow = expr.without_upcast()
    assert narrow.dtype == ml_dtypes.bfloat16
    require_equal_rows(narrow, current.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    "dtypes",
    [
        ("bfloat16", "float16", "bfloat16"),
        ("float32", "bfloat16", "float32"),
        ("float16", "float32", "float64"),
    ],
)
def test_tensors_of_several_dtypes_lie_side_by_side_with_the_numbers_they_have(
    dtypes: tuple[str, ...], axis: int
) -> None:
    values = [numbers(4, 4 + i if axis else 4).astype(np.dtype(dtype)) for i, dtype in enumerate(dtypes)]
    joined = Concat([Constant(dtype, value) for dtype, value in zip(dtypes, values, strict=True)], axis)
    wanted = np.concatenate([value.astype(np.float64) for value in values], axis)
    for expr in (joined, joined.without_upcast()):
        np.testing.assert_array_equal(expr.whole().astype(np.float64), wanted)
        np.testing.assert_array_equal(expr.rows(2, 4).astype(np.float64), wanted[2:4])


def test_arithmetic_happens_in_the_precision_of_the_graph() -> None:
    # 1 + w of a bf16 norm weight: in bf16 the sum would be rounded before it is stored in float32
    value = np.full((16,), 0.00390625 + 0.000030517578125, np.float32).astype(ml_dtypes.bfloat16)
    nodes = [node("Cast", ["w"], "c", to=TensorProto.FLOAT), node("Add", ["c", "one"])]
    expr = WeightGraph(model_of(nodes, {**_I, "w": value})).expr("y")
    source = PackedSource.plain("n", expr, "f32")
    stored = np.frombuffer(b"".join(bytes(chunk) for chunk in source.chunks()), np.float32)
    np.testing.assert_array_equal(stored, 1 + value.astype(np.float32))


def test_a_scalar_is_a_weight_of_one_element() -> None:
    model = model_of([node("Mul", ["one", "two"])], {**_I, "two": np.array(2, np.float32)})
    expr = WeightGraph(model).expr("y")
    assert expr.shape == ()
    assert expr.whole() == 2
    source = PackedSource.plain("s", Constant("s", expr.whole()))
    assert source.shape == (1,)
