"""Generic ops: every function, broadcasting, and data movement with a symbolic size at any place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from castiron.plugins import Operand, Tactic, host
from castiron.plugins.cuda import TACTICS
from lowering import assert_close, run, to_torch

BY_NAME: dict[str, Tactic] = {tactic.name: tactic for tactic in TACTICS}
T = 5
Shape = tuple[int | str, ...]


def fixed(shape: Shape) -> tuple[int, ...]:
    return tuple(T if isinstance(dim, str) else dim for dim in shape)


def values(shape: Shape, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(fixed(shape)).astype(np.float32)


def numbers(name: str, *given: int) -> tuple[Operand, None]:
    return Operand(name, (len(given),), "i32", constant=True, values=np.array(given)), None


def test_every_op_that_the_host_computes_has_a_cuda_tactic_with_a_reference() -> None:
    kinds = {tactic.kind for tactic in TACTICS}
    assert {tactic.kind for tactic in host.TACTICS} <= kinds
    assert [tactic.name for tactic in TACTICS if tactic.reference is None] == []


FUNCTIONS = {
    "silu": torch.nn.functional.silu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "gelu_erf": torch.nn.functional.gelu,
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x) ** 2,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "neg": torch.neg,
    "abs": torch.abs,
    "reciprocal": torch.reciprocal,
    "softplus": torch.nn.functional.softplus,
    "sin": torch.sin,
    "cos": torch.cos,
    "erf": torch.erf,
    "square": torch.square,
}


@pytest.mark.parametrize("fn", FUNCTIONS)
def test_every_function_agrees_with_torch_in_float64(fn: str) -> None:
    # Large and tiny numbers too: saturation, and the cancellation of tanh near zero.
    x = torch.cat([torch.linspace(-12, 12, 47), torch.tensor([-1e-3, 1e-5, -2e-2, 3.1e-2, 90.0, -90.0, 0.0])])
    if fn in ("log", "sqrt", "rsqrt"):
        x = x.abs() + 1e-3
    if fn == "reciprocal":
        x = x + 0.123
    if fn == "exp":
        x = x.clamp(max=80.0)  # float32 ends at e^88
    x = x.reshape(1, -1).repeat(T, 1)
    (y,) = run(
        BY_NAME["cuda.activation"],
        "castiron.Activation",
        [(Operand("x", ("T", 54)), x)],
        [Operand("y", ("T", 54))],
        {"fn": fn},
        {"T": T},
    )
    assert_close(y, FUNCTIONS[fn](x.double()), rtol=4e-6, atol=2e-7)


@pytest.mark.parametrize("kind", ["Add", "Sub", "Mul", "Div", "Min", "Max", "Pow"])
@pytest.mark.parametrize(
    ("a", "b", "out"),
    [
        (("T", 6), ("T", 6), ("T", 6)),
        (("T", 6), (6,), ("T", 6)),
        (("T", 1, 4), ("T", 3, 1), ("T", 3, 4)),
        ((3, "T", 4), (3, 1, 4), (3, "T", 4)),
        ((1,), ("T", 300, 4), ("T", 300, 4)),
    ],
)
def test_binary_functions_broadcast_like_numpy(kind: str, a: Shape, b: Shape, out: Shape) -> None:
    tactic = next(t for t in TACTICS if t.kind == kind)
    p, q = np.abs(values(a, 1)) + 0.5, values(b, 2)
    (y,) = run(
        tactic,
        kind,
        [(Operand("a", a), to_torch(p, "f32")), (Operand("b", b), to_torch(q, "f32"))],
        [Operand("y", out)],
        counts={"T": T},
    )
    functions = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide}
    functions |= {"Min": np.minimum, "Max": np.maximum, "Pow": np.power}
    assert_close(y, functions[kind](p.astype(np.float64), q), rtol=2e-6)


def test_a_constant_operand_may_stand_on_either_side() -> None:
    x = to_torch(values(("T", 4)), "bf16")
    w = torch.tensor([3.0])
    for left in (True, False):
        operands = [(Operand("x", ("T", 4), "bf16"), x), (Operand("w", (1,), constant=True), w)]
        (y,) = run(
            BY_NAME["cuda.sub"],
            "Sub",
            operands[::-1] if left else operands,
            [Operand("y", ("T", 4), "f32")],
            counts={"T": T},
        )
        assert torch.equal(y, 3.0 - x.float() if left else x.float() - 3.0)


def test_powers_of_negative_numbers() -> None:
    a = torch.tensor([[-2.0, -2.0, -2.0, 0.0, -1.5]])
    b = torch.tensor([[2.0, 3.0, 0.5, 0.0, -1.0]])
    (y,) = run(
        BY_NAME["cuda.pow"],
        "Pow",
        [(Operand("a", (1, 5)), a), (Operand("b", (1, 5)), b)],
        [Operand("y", (1, 5))],
    )
    np.testing.assert_allclose(y.numpy(), torch.pow(a.double(), b.double()).numpy(), rtol=1e-6)


def test_clip_keeps_nan_and_takes_an_absent_bound() -> None:
    x = torch.tensor([[-9.0, 0.5, 9.0, torch.nan]])
    low = (Operand("low", (1,), constant=True, values=np.array([-1.0])), None)
    (y,) = run(BY_NAME["cuda.clip"], "Clip", [(Operand("x", (1, 4)), x), low], [Operand("y", (1, 4))])
    np.testing.assert_array_equal(y.numpy(), [[-1.0, 0.5, 9.0, np.nan]])


@pytest.mark.parametrize(
    ("shape", "perm"),
    [(("T", 6), [1, 0]), ((2, "T", 3), [1, 0, 2]), ((2, 3, "T", 4), [2, 0, 3, 1]), ((4, 3, 2), [2, 1, 0])],
)
def test_transpose(shape: Shape, perm: list[int]) -> None:
    x = values(shape)
    (y,) = run(
        BY_NAME["cuda.transpose"],
        "Transpose",
        [(Operand("x", shape), to_torch(x, "f32"))],
        [Operand("y", tuple(shape[p] for p in perm))],
        {"perm": perm},
        {"T": T},
    )
    np.testing.assert_array_equal(y.numpy(), x.transpose(perm))


@pytest.mark.parametrize(
    ("shape", "starts", "ends", "axes", "steps"),
    [
        (("T", 10), [2], [7], [1], [1]),
        (("T", 10), [1], [10], [1], [3]),
        ((4, "T", 6), [1], [3], [0], [1]),
        (("T", 4, 6), [1, 2], [4, 6], [1, 2], [1, 2]),
    ],
)
def test_slice(shape: Shape, starts: list[int], ends: list[int], axes: list[int], steps: list[int]) -> None:
    x = values(shape)
    index = [slice(None)] * x.ndim
    out = list(shape)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        index[axis] = slice(start, end, step)
        out[axis] = len(range(start, end, step))
    bounds = [numbers(n, *v) for n, v in (("s", starts), ("e", ends), ("a", axes), ("p", steps))]
    (y,) = run(
        BY_NAME["cuda.slice"],
        "Slice",
        [(Operand("x", shape), to_torch(x, "f32")), *bounds],
        [Operand("y", tuple(out))],
        counts={"T": T},
    )
    np.testing.assert_array_equal(y.numpy(), x[tuple(index)])


def test_slices_on_both_sides_of_the_symbolic_axis_are_refused() -> None:
    from castiron.plugins import Op
    from lowering import context

    op = Op(
        "Slice",
        (Operand("x", (4, "T", 6)), *(numbers("n", 1, 1)[0] for _ in range(2)), numbers("a", 0, 2)[0]),
        (Operand("y", (3, "T", 5)),),
    )
    assert not BY_NAME["cuda.slice"].accepts(op, context())


@pytest.mark.parametrize(("shape", "axis"), [(("T", 9), 1), (("T", 9, 2), 1), ((9, "T"), 0)])
def test_split_and_concat_undo_each_other(shape: Shape, axis: int) -> None:
    x = values(shape)
    parts = []
    for size in (2, 3, 4):
        part = list(shape)
        part[axis] = size
        parts.append(tuple(part))
    pieces = run(
        BY_NAME["cuda.split"],
        "Split",
        [(Operand("x", shape), to_torch(x, "f32"))],
        [Operand(f"p{i}", part) for i, part in enumerate(parts)],
        {"axis": axis},
        {"T": T},
    )
    for piece, expected in zip(pieces, np.split(x, [2, 5], axis=axis), strict=True):
        np.testing.assert_array_equal(piece.numpy(), expected)
    reference = BY_NAME["cuda.split"].reference
    assert reference is not None
    assert [part.shape for part in reference(x, np.array([2, 3, 4]), axis=axis)] == [fixed(p) for p in parts]
    (y,) = run(
        BY_NAME["cuda.concat"],
        "Concat",
        [
            (Operand(f"p{i}", part), piece.contiguous())
            for i, (part, piece) in enumerate(zip(parts, pieces, strict=True))
        ],
        [Operand("y", shape)],
        {"axis": axis},
        {"T": T},
    )
    np.testing.assert_array_equal(y.numpy(), x)


@pytest.mark.parametrize(
    ("shape", "out"), [((1, 4), ("T", 4)), (("T", 1, 4), ("T", 3, 4)), ((2, 1, "T"), (2, 3, "T"))]
)
def test_expand(shape: Shape, out: Shape) -> None:
    x = values(shape)
    (y,) = run(
        BY_NAME["cuda.expand"],
        "Expand",
        [(Operand("x", shape), to_torch(x, "f32"))],
        [Operand("y", out)],
        counts={"T": T},
    )
    np.testing.assert_array_equal(y.numpy(), np.broadcast_to(x, fixed(out)))


def test_copy_reads_views_reshapes_and_converts() -> None:
    wide = to_torch(values(("T", 20)), "f32")
    (y,) = run(
        BY_NAME["cuda.copy"],
        "castiron.Copy",
        [(Operand("x", ("T", 6)), wide[:, 3:9])],
        [Operand("y", ("T", 2, 3), "bf16")],
        counts={"T": T},
    )
    assert torch.equal(y, wide[:, 3:9].reshape(T, 2, 3).bfloat16())


def test_copy_of_a_value_with_three_axes() -> None:
    x = to_torch(values(("T", 2, 3)), "bf16")
    (y,) = run(
        BY_NAME["cuda.copy"],
        "castiron.Copy",
        [(Operand("x", ("T", 2, 3), "bf16"), x)],
        [Operand("y", ("T", 6))],
        counts={"T": T},
    )
    assert torch.equal(y, x.reshape(T, 6).float())


@pytest.mark.parametrize("shape", [("T", 7), (3, "T"), ("T", 2, 5000)])
def test_softmax_and_reductions_over_the_last_axis(shape: Shape) -> None:
    x = torch.from_numpy(values(shape))
    operand = (Operand("x", shape), x)
    (y,) = run(BY_NAME["cuda.softmax"], "Softmax", [operand], [Operand("y", shape)], counts={"T": T})
    assert_close(y, torch.softmax(x.double(), -1))
    for fn, expected in (("sum", x.double().sum(-1)), ("mean", x.double().mean(-1)), ("max", x.amax(-1))):
        (y,) = run(
            BY_NAME[f"cuda.reduce_{fn}"],
            f"Reduce{fn.title()}",
            [operand, numbers("axes", -1)],
            [Operand("y", (*shape[:-1], 1))],
            counts={"T": T},
        )
        assert_close(y[..., 0], expected, atol=2e-4)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((3, "T", 40), (3, 40, 33)),
        (("T", 2, 5), ("T", 5, 3)),
        (("T", 8), (8, "T")),
        ((2, 7, "T"), (2, "T", 9)),
    ],
)
def test_matmul_of_two_activations(a: Shape, b: Shape) -> None:
    p, q = values(a, 1), values(b, 2)
    (y,) = run(
        BY_NAME["cuda.matmul"],
        "MatMul",
        [(Operand("a", a), to_torch(p, "f32")), (Operand("b", b), to_torch(q, "f32"))],
        [Operand("y", (*a[:-1], b[-1]))],
        counts={"T": T},
    )
    assert_close(y, p.astype(np.float64) @ q)
