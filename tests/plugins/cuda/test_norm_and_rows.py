"""Norms and row lookups against float64 references and torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from castiron.plugins import Operand
from castiron.plugins.cuda import embedding, norm
from lowering import assert_close, run, to_torch

NORMS = {tactic.name: tactic for tactic in (*norm.TACTICS, *embedding.TACTICS)}


def vector(rng: np.random.Generator, name: str, size: int) -> tuple[Operand, torch.Tensor]:
    return Operand(name, (size,), constant=True), to_torch(rng.standard_normal(size), "f32")


@pytest.mark.parametrize(("rows", "columns", "group"), [(1, 576, 0), (7, 96, 32), (17, 33, 0), (3, 5000, 0)])
@pytest.mark.parametrize(("x_dtype", "y_dtype"), [("f32", "bf16"), ("bf16", "f32"), ("f16", "f16")])
def test_rms_norm_of_rows_and_of_runs(
    rows: int, columns: int, group: int, x_dtype: str, y_dtype: str
) -> None:
    rng = np.random.default_rng(columns)
    x = to_torch(rng.standard_normal((rows, columns)), x_dtype)
    w = vector(rng, "w", group or columns)
    (y,) = run(
        NORMS["cuda.rms_norm"],
        "castiron.RMSNorm",
        [(Operand("x", ("T", columns), x_dtype), x), w],
        [Operand("y", ("T", columns), y_dtype)],
        {"eps": 1e-5, "group": group},
        {"T": rows},
    )
    expected = torch.nn.functional.rms_norm(
        x.double().reshape(rows, -1, group or columns), (group or columns,), w[1].double(), 1e-5
    )
    assert_close(y, expected.reshape(rows, columns))


def test_layer_norm_with_weight_and_bias_of_a_column_view() -> None:
    rng = np.random.default_rng(1)
    wide = torch.full((5, 100), torch.nan)
    wide[:, 13:61] = torch.from_numpy(rng.standard_normal((5, 48)) + 3)
    w, b = vector(rng, "w", 48), vector(rng, "b", 48)
    (y,) = run(
        NORMS["cuda.layer_norm"],
        "castiron.LayerNorm",
        [(Operand("x", ("T", 48)), wide[:, 13:61]), w, b],
        [Operand("y", ("T", 48))],
        {"eps": 1e-5},
        {"T": 5},
    )
    expected = torch.nn.functional.layer_norm(wide[:, 13:61].double(), (48,), w[1].double(), b[1].double())
    assert_close(y, expected)


def test_layer_norm_without_weights_over_three_axes() -> None:
    x = torch.randn(4, 3, 24, generator=torch.Generator().manual_seed(0))
    (y,) = run(
        NORMS["cuda.layer_norm"],
        "castiron.LayerNorm",
        [(Operand("x", ("T", 3, 24)), x)],
        [Operand("y", ("T", 3, 24))],
        {"eps": 1e-6},
        {"T": 4},
    )
    assert_close(y, torch.nn.functional.layer_norm(x.double(), (24,), eps=1e-6))


@pytest.mark.parametrize("name", ["add_rms_norm", "add_layer_norm"])
def test_add_norms_give_the_norm_and_the_sum(name: str) -> None:
    rng = np.random.default_rng(2)
    x, residual = (to_torch(rng.standard_normal((6, 72)), "f32") for _ in range(2))
    tactic = NORMS[f"cuda.{name}"]
    w = vector(rng, "w", 72)
    y, total = run(
        tactic,
        tactic.kind,
        [(Operand("x", ("T", 72)), x), (Operand("r", ("T", 72)), residual), w],
        [Operand("y", ("T", 72), "bf16"), Operand("s", ("T", 72))],
        {"eps": 1e-5},
        {"T": 6},
    )
    assert_close(total, (x.double() + residual.double()))
    expected, _ = tactic.reference(x.numpy(), residual.numpy(), w[1].numpy(), eps=1e-5)
    assert_close(y, expected)


@pytest.mark.parametrize("width", [40, 1500])
def test_embedding_scales_rows_and_offsets_ids(width: int) -> None:
    rng = np.random.default_rng(3)
    table = to_torch(rng.standard_normal((20, width)), "bf16")
    ids = torch.tensor([0, 17, 3], dtype=torch.int32)
    (y,) = run(
        NORMS["cuda.embedding"],
        "castiron.Embedding",
        [
            (Operand("ids", ("T",), "i32"), ids),
            (Operand("table", (20, width), constant=True), table),
        ],
        [Operand("y", ("T", width))],
        {"scale": 2.5, "index_offset": 2},
        {"T": 3},
    )
    assert_close(y, table.double()[ids.long() + 2] * 2.5)


def test_rows_that_want_logits_are_gathered_from_a_view() -> None:
    x = torch.randn(9, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows = torch.tensor([8, 0, 5], dtype=torch.int32)
    (y,) = run(
        NORMS["cuda.gather_rows"],
        "castiron.GatherRows",
        [(Operand("x", ("T", 33), "bf16"), x[:, 7:40]), (Operand("rows", ("N",), "i32"), rows)],
        [Operand("y", ("N", 33), "f32")],
        counts={"T": 9, "N": 3},
    )
    assert torch.equal(y, x[:, 7:40].float()[rows.long()])


def test_gather_takes_slices_of_an_activation_or_a_weight() -> None:
    x = torch.randn(6, 2, 5, generator=torch.Generator().manual_seed(0))
    indices = torch.tensor([[5, 0], [1, 1], [3, 2]], dtype=torch.int32)
    for constant in (False, True):
        (y,) = run(
            NORMS["cuda.gather"],
            "Gather",
            [
                (Operand("x", (6, 2, 5), constant=constant), x),
                (Operand("i", ("T", 2), "i32"), indices),
            ],
            [Operand("y", ("T", 2, 2, 5))],
            {"axis": 0},
            {"T": 3},
        )
        assert torch.equal(y, x[indices.long()])
