"""What routers pick, run by its launches in the Triton interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from castiron.plugins import Op, Operand
from castiron.plugins.cuda.routing import TACTICS
from lowering import assert_close, context, run, to_torch

TOP_K, GATHER, MARK, COMBINE = TACTICS
T = 5
Shape = tuple[int | str, ...]


def fixed(shape: Shape) -> tuple[int, ...]:
    return tuple(T if isinstance(dim, str) else dim for dim in shape)


def picked(x: np.ndarray, k: int, shape: Shape = ("T",)) -> tuple[np.ndarray, np.ndarray]:
    """What the kernel and the reference agree on."""
    number = Operand("k", (1,), "i32", constant=True, values=np.array([k]))
    values, places = run(
        TOP_K,
        "TopK",
        [(Operand("x", (*shape, x.shape[-1])), to_torch(x, "f32")), (number, None)],
        [Operand("v", (*shape, k)), Operand("i", (*shape, k), "i32")],
        {"axis": len(shape)},
        {"T": T},
    )
    expected = TOP_K.reference(x, np.array([k]), axis=-1)
    np.testing.assert_array_equal(values.numpy(), expected[0])
    np.testing.assert_array_equal(places.numpy(), expected[1])
    return values.numpy(), places.numpy()


@pytest.mark.parametrize(
    ("shape", "k"), [(("T", 8), 2), (("T", 60), 6), (("T", 3, 5), 5), ((2, "T", 500), 16)]
)
def test_the_largest_come_in_descending_order(shape: Shape, k: int) -> None:
    x = np.random.default_rng(0).standard_normal(fixed(shape)).astype(np.float32)
    values, places = picked(x, k, shape[:-1])
    np.testing.assert_array_equal(values, -np.sort(-x, -1)[..., :k])
    np.testing.assert_array_equal(values, np.take_along_axis(x, places, -1))


def test_of_equal_numbers_the_first_is_picked_and_nan_is_below_all() -> None:
    nan, inf = np.nan, np.inf
    rows = [
        [1.0, 3.0, 3.0, 2.0, 3.0],
        [0.0, -0.0, 0.0, -0.0, -1.0],
        [nan, -inf, nan, inf, -1.0],
        [nan] * 5,
        [-inf] * 5,
    ]
    _, places = picked(np.array(rows, np.float32), 4)
    expected = [[1, 2, 4, 3], [0, 1, 2, 3], [3, 4, 1, 0], [0, 1, 2, 3], [0, 1, 2, 3]]
    np.testing.assert_array_equal(places, expected)


def test_more_picks_than_registers_hold_and_other_axes_are_left_to_others() -> None:
    def op(shape: Shape, k: int, **attrs: int) -> Op:
        picks = (*shape[:-1], k)
        operands = (Operand("x", shape), Operand("k", (1,), "i32", constant=True, values=np.array([k])))
        return Op("TopK", operands, (Operand("v", picks), Operand("i", picks, "i32")), attrs)

    assert TOP_K.accepts(op(("T", 64), 8, axis=-1), context())
    assert not TOP_K.accepts(op(("T", 64), 40, axis=-1), context())
    assert not TOP_K.accepts(op(("T", 64, 2), 2, axis=1), context())
    assert not TOP_K.accepts(op(("T", 64), 8, axis=1, largest=0), context())


@pytest.mark.parametrize(("shape", "count"), [(("T", 9), 4), (("T", 3, 600), 2), ((7, 5), 5)])
def test_elements_are_gathered_by_place(shape: Shape, count: int) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal(fixed(shape)).astype(np.float32)
    places = rng.integers(0, x.shape[-1], (*x.shape[:-1], count)).astype(np.int32)
    out = (*shape[:-1], count)
    (y,) = run(
        GATHER,
        "GatherElements",
        [(Operand("x", shape), to_torch(x, "f32")), (Operand("i", out, "i32"), to_torch(places, "i32"))],
        [Operand("y", out)],
        {"axis": -1},
        {"T": T},
    )
    np.testing.assert_array_equal(y.numpy(), GATHER.reference(x, places, axis=-1)[0])


@pytest.mark.parametrize(("shape", "width"), [(("T", 2), 9), (("T", 3, 4), 600), ((7, 1), 1)])
def test_places_are_marked(shape: Shape, width: int) -> None:
    rng = np.random.default_rng(3)
    places = rng.integers(0, width, fixed(shape)).astype(np.int32)
    (y,) = run(
        MARK,
        "castiron.MarkPlaces",
        [(Operand("places", shape, "i32"), to_torch(places, "i32"))],
        [Operand("y", (*shape[:-1], width))],
        {"width": width},
        {"T": T},
    )
    np.testing.assert_array_equal(y.numpy(), MARK.reference(places, width=width)[0])


@pytest.mark.parametrize(("picks", "width", "dtype"), [(1, 40, "f32"), (3, 1500, "bf16"), (8, 64, "f32")])
def test_a_tokens_outputs_are_summed_by_weight(picks: int, width: int, dtype: str) -> None:
    rng = np.random.default_rng(2)
    outputs = rng.standard_normal((T, picks, width)).astype(np.float32)
    weights = rng.random((T, picks)).astype(np.float32)
    (y,) = run(
        COMBINE,
        "castiron.CombineExperts",
        [
            (Operand("o", ("T", picks, width)), to_torch(outputs, "f32")),
            (Operand("w", ("T", picks)), to_torch(weights, "f32")),
        ],
        [Operand("y", ("T", width), dtype)],  # type: ignore[arg-type]
        counts={"T": T},
    )
    assert y.dtype == (torch.float32 if dtype == "f32" else torch.bfloat16)
    assert_close(y, COMBINE.reference(outputs, weights)[0])
