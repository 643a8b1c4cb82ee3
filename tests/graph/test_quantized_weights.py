"""Quantized weight expressions: numbers, streaming and the parts that kernels take, against plain numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import pytest
from castiron.graph.weights import QuantizedParts, WeightGraph
from castiron.graph.weights import exprs as weight_exprs
from onnx import TensorProto, helper, numpy_helper

from castiron.errors import BuildError

Array = npt.NDArray[Any]
ROWS, INPUTS, GROUP = 11, 40, 16  # the last group has 8 inputs


def random(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def graph_of(nodes: Sequence[onnx.NodeProto], tensors: dict[str, Array]) -> WeightGraph:
    output = onnx.ValueInfoProto(name=nodes[-1].output[0])
    initializers = [numpy_helper.from_array(value, name) for name, value in tensors.items()]
    graph = helper.make_graph(list(nodes), "g", [], [output], initializers)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("castiron", 1)]
    return WeightGraph(helper.make_model(graph, opset_imports=opsets))


def own(op: str, inputs: Sequence[str], output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, list(inputs), [output], domain="castiron", **attributes)


def std(op: str, inputs: Sequence[str], output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, list(inputs), [output], **attributes)


def codes_of(format: str, seed: int, shape: tuple[int, int] = (ROWS, INPUTS)) -> Array:
    low, high, dtype = {
        "int8": (-128, 128, np.int8),
        "int4": (-8, 8, np.int8),
        "fp8": (0, 0x7F, np.uint8),
        "fp4": (0, 16, np.uint8),
    }[format]
    return random(seed).integers(low, high, shape).astype(dtype)


def numbers_of(codes: Array, format: str) -> Array:
    """The codes' values in float64, by ml_dtypes."""
    if format.startswith("int"):
        return codes.astype(np.float64)
    kind = ml_dtypes.float8_e4m3fn if format == "fp8" else ml_dtypes.float4_e2m1fn
    return codes.view(kind).astype(np.float64)


def scales_of(seed: int, rows: int = ROWS, group: int = GROUP, inputs: int = INPUTS) -> Array:
    count = -(-inputs // group) if group else 1
    return random(seed).uniform(0.5, 2, (rows, count)).astype(np.float32)


def spread(scale: Array, group: int, inputs: int = INPUTS) -> Array:
    """A scale for every input, float64."""
    return np.repeat(scale.astype(np.float64), group or inputs, 1)[:, :inputs]


def require_streamed(graph: WeightGraph, name: str, expected: Array) -> None:
    expr = graph.expr(name)
    assert expr.shape == expected.shape
    np.testing.assert_array_equal(expr.whole(), expected)
    for start in range(0, expected.shape[0], 3):
        for stop in {min(expected.shape[0], start + 1), min(expected.shape[0], start + 5)}:
            np.testing.assert_array_equal(expr.rows(start, stop), expected[start:stop])
            wide = np.zeros((stop - start, expected.shape[1] + 2), expected.dtype)
            expr.fill(start, stop, wide[:, 1:-1])  # into memory with gaps, as a concatenation does
            np.testing.assert_array_equal(wide[:, 1:-1], expected[start:stop])


@pytest.mark.parametrize("piece", [1, 1 << 24])
@pytest.mark.parametrize("with_offset", [False, True])
@pytest.mark.parametrize("group", [0, 16, 8, 64])
@pytest.mark.parametrize("format", ["int8", "int4", "fp8", "fp4"])
def test_dequantize_multiplies_each_code_by_the_scale_of_its_group(
    format: str, group: int, with_offset: bool, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_exprs, "PIECE_BYTES", piece)
    codes, scale, offset = codes_of(format, 1), scales_of(2, group=group), scales_of(3, group=group)
    inputs = ["q", "s", "o"] if with_offset else ["q", "s"]
    tensors = {"q": codes, "s": scale, "o": offset}
    graph = graph_of([own("Dequantize", inputs, "w", format=format, group=group)], tensors)
    product = (numbers_of(codes, format) * spread(scale, group)).astype(np.float32)
    # float32 arithmetic: the product is rounded before the offset is added
    expected = product + spread(offset, group).astype(np.float32) if with_offset else product
    require_streamed(graph, "w", expected)


@pytest.mark.parametrize("with_offset", [False, True])
@pytest.mark.parametrize("group", [0, 16, 64])
@pytest.mark.parametrize("format", ["int8", "int4", "fp8", "fp4"])
def test_quantize_takes_the_nearest_code_and_gives_codes_of_codes_back(
    format: str, group: int, with_offset: bool
) -> None:
    # Scales that are powers of two: every product of code and scale is exact, and so is the way back.
    codes, scale = codes_of(format, 4), np.exp2(np.floor(np.log2(scales_of(5, group=group))))
    offset = np.round(scales_of(6, group=group) * 4)
    numbers = (numbers_of(codes, format) * spread(scale, group)).astype(np.float32)
    if with_offset:
        numbers += spread(offset, group).astype(np.float32)
    inputs = ["v", "s", "o"] if with_offset else ["v", "s"]
    tensors = {"v": numbers, "s": scale, "o": offset}
    graph = graph_of([own("Quantize", inputs, "q", format=format, group=group)], tensors)
    if format == "fp4":
        codes = np.where((codes == 8) & with_offset, 0, codes)  # -0 plus an offset forgets its sign
    if format == "fp8" and with_offset:
        recovered = numbers_of(graph.expr("q").whole(), format)
        np.testing.assert_allclose(recovered, numbers_of(codes, format), rtol=2**-4, atol=2**-6)
        return  # small numbers beside the offset lose bits in float32, as they must
    require_streamed(graph, "q", codes)


def test_a_scale_of_zero_gives_codes_of_zero() -> None:
    tensors = {"v": np.ones((2, 8), np.float32), "s": np.array([[0], [1]], np.float32)}
    graph = graph_of([own("Quantize", ["v", "s"], "q", format="int8", group=0)], tensors)
    np.testing.assert_array_equal(graph.expr("q").whole(), np.repeat([[0], [1]], 8, 1))


def test_codes_that_are_made_while_packing_are_parts_too() -> None:
    tensors = {"v": random(0).standard_normal((ROWS, INPUTS)).astype(np.float32), "s": scales_of(1)}
    nodes = [
        own("Quantize", ["v", "s"], "q", format="int4", group=GROUP),
        own("Dequantize", ["q", "s"], "w", format="int4", group=GROUP),
    ]
    graph = graph_of(nodes, tensors)
    parts = require_parts(graph, "w")
    assert parts.codes.dtype == np.int8
    error = np.abs(graph.expr("w").whole() - tensors["v"])
    inside = np.abs(tensors["v"]) <= 7 * spread(tensors["s"], GROUP)
    assert (error <= spread(tensors["s"], GROUP) / 2 * (1 + 1e-6))[inside].all()


# -- parts ---------------------------------------------------------------------------------------------------


def require_parts(graph: WeightGraph, name: str) -> QuantizedParts:
    """The parts, checked: put together by numpy they are the value."""
    expr = graph.expr(name)
    parts = expr.parts()
    assert parts is not None
    codes, scale = parts.codes.whole(), parts.scale.whole()
    numbers = (numbers_of(codes, parts.format) * spread(scale, parts.group)).astype(np.float32)
    if parts.offset is not None:
        numbers += spread(parts.offset.whole(), parts.group).astype(np.float32)
    expected = np.empty_like(numbers)
    columns = np.arange(INPUTS) if parts.columns is None else parts.columns
    expected[:, columns] = numbers
    np.testing.assert_array_equal(expr.whole(), expected)
    return parts


def ints(*values: int) -> Array:
    return np.array(values, np.int64)


_TENSORS: dict[str, Array] = {
    "q1": codes_of("int4", 1),
    "s1": scales_of(2),
    "q2": codes_of("int4", 3, (5, INPUTS)),
    "s2": scales_of(4, rows=5),
    "o2": scales_of(5, rows=5),
    "perm": random(6).permutation(INPUTS),
    "perm2": random(7).permutation(INPUTS),
    "picked": ints(3, 4, 5, 0, 10, 9, -9),
    "same": ints(ROWS, -1),
    "start": ints(2),
    "stop": ints(9),
    "axis0": ints(0),
    "axis1": ints(1),
    "sizes": ints(4, 7),
}
_W1 = own("Dequantize", ["q1", "s1"], "w1", format="int4", group=GROUP)
_W2 = own("Dequantize", ["q2", "s2", "o2"], "w2", format="int4", group=GROUP)

MOVES: dict[str, list[onnx.NodeProto]] = {
    "rows one below the other": [std("Concat", ["w1", "w2"], "y", axis=0)],
    "a range of rows": [std("Slice", ["w1", "start", "stop", "axis0"], "y")],
    "rows in another order": [std("Gather", ["w1", "picked"], "y", axis=0)],
    "columns in another order": [std("Gather", ["w1", "perm"], "y", axis=1)],
    "columns twice in another order": [
        std("Gather", ["w1", "perm"], "t", axis=1),
        std("Gather", ["t", "perm2"], "y", axis=-1),
    ],
    "two with the same order of columns": [
        std("Gather", ["w1", "perm"], "t1", axis=1),
        std("Gather", ["w2", "perm"], "t2", axis=1),
        std("Concat", ["t1", "t2"], "y", axis=0),
    ],
    "nothing": [
        std("Identity", ["w1"], "i"),
        std("Reshape", ["i", "same"], "r"),
        std("Cast", ["r"], "y", to=TensorProto.FLOAT),
    ],
    "transposed there and back": [
        std("Transpose", ["w1"], "t", perm=[1, 0]),
        std("Transpose", ["t"], "y", perm=[1, 0]),
    ],
    "permuted rows of a part of a fused matrix": [
        std("Concat", ["w2", "w1"], "f", axis=0),
        std("Slice", ["f", "start", "stop", "axis0"], "t"),
        std("Gather", ["t", "axis1"], "y", axis=0),
    ],
}


@pytest.mark.parametrize("name", MOVES)
def test_parts_follow_what_moves_rows_and_columns(name: str) -> None:
    require_parts(graph_of([_W1, _W2, *MOVES[name]], _TENSORS), "y")


def test_parts_of_a_split_projection_are_those_of_its_rows() -> None:
    split = helper.make_node("Split", ["w1", "sizes"], ["a", "y"], axis=0)
    graph = graph_of([_W1, split], _TENSORS)
    np.testing.assert_array_equal(require_parts(graph, "y").codes.whole(), _TENSORS["q1"][4:])


OTHERWISE: dict[str, list[onnx.NodeProto]] = {
    "arithmetic": [std("Mul", ["w1", "w1"], "y")],
    "a transposed matrix": [std("Transpose", ["w1"], "y", perm=[1, 0])],
    "some of the columns": [std("Slice", ["w1", "start", "stop", "axis1"], "y")],
    "a column twice": [std("Gather", ["w1", "picked"], "y", axis=1)],
    "columns side by side": [std("Concat", ["w1", "w1"], "y", axis=1)],
    "another width": [std("Cast", ["w1"], "y", to=TensorProto.FLOAT16)],
    "unequal orders of columns": [
        std("Gather", ["w1", "perm"], "t", axis=1),
        std("Concat", ["t", "w2"], "y", axis=0),
    ],
    "unequal groups": [
        own("Dequantize", ["q1", "coarse"], "c", format="int4", group=0),
        std("Concat", ["w1", "c"], "y", axis=0),
    ],
    "a plain matrix among them": [std("Concat", ["w1", "plain"], "y", axis=0)],
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_does_more_than_move_has_no_parts_but_its_numbers(name: str) -> None:
    more = {"coarse": scales_of(8, group=0), "plain": np.ones((2, INPUTS), np.float32)}
    graph = graph_of([_W1, _W2, *OTHERWISE[name]], {**_TENSORS, **more})
    assert graph.expr("y").parts() is None
    assert graph.expr("y").whole().size


WRONG: dict[str, tuple[onnx.NodeProto, str]] = {
    "scales of another group": (
        own("Dequantize", ["q1", "s1"], "y", format="int4", group=32),
        r"float32 \[11, 3\], expected float32 \[11, 2\] for groups of 32",
    ),
    "offsets of other rows": (
        own("Dequantize", ["q1", "s1", "o2"], "y", format="int4", group=GROUP),
        "offset",
    ),
    "codes of another type": (own("Dequantize", ["q1", "s1"], "y", format="fp4", group=GROUP), "int8.*fp4"),
    "a format that is none": (own("Quantize", ["s1", "s1"], "y", format="int3", group=1), "'int3'"),
    "a layout that is none": (own("Unpack", ["q1"], "y", layout="int5_words"), "'int5_words'"),
    "raw bytes of another type": (own("Unpack", ["q1"], "y", layout="fp4_pairs"), "int8, expected uint8"),
}


@pytest.mark.parametrize("name", WRONG)
def test_parts_that_do_not_go_together_are_refused(name: str) -> None:
    node, message = WRONG[name]
    with pytest.raises(BuildError, match=message):
        graph_of([node], _TENSORS).expr("y")
