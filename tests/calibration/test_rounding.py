"""Error-compensated rounding against its definition in float64 and against plain rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from castiron.calibration.grids import GRIDS
from castiron.calibration.recipes import ScaleKind
from castiron.calibration.rounding import (
    compensate,
    fit_scales,
    inverse_factor,
    nearest,
    output_error,
    second_moments,
)
from castiron.calibration.scales import weight_scales
from castiron.graph.quant_plan import WeightFormat

CASES: list[tuple[WeightFormat, int, ScaleKind]] = [
    ("int4", 32, "float16"),
    ("int8", 0, "float32"),
    ("fp8", 0, "float32"),
    ("fp8", 128, "block128"),
    ("fp4", 16, "nvfp4"),
    ("fp4", 32, "e8m0"),
]


def _problem(rows: int = 48, width: int = 88) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight, and second moments of inputs that are correlated and of very different sizes."""
    torch.manual_seed(7)
    mixing = torch.randn(width, width) / width**0.5 + torch.eye(width)
    x = torch.randn(1024, width) @ mixing * torch.exp(torch.randn(width))
    return torch.randn(rows, width) * 0.1, x.T @ x / len(x)


def test_the_factor_is_that_of_the_inverse() -> None:
    _, moments = _problem()
    upper, order = inverse_factor(moments)
    ordered = moments[order][:, order].double()
    assert torch.equal(ordered.diagonal(), ordered.diagonal().sort(descending=True).values)
    damped = ordered + 0.01 * ordered.diagonal().mean() * torch.eye(len(ordered))
    product = upper.double().T @ upper.double() @ damped
    # float32: the condition number here is some thousands
    np.testing.assert_allclose(product.numpy(), np.eye(len(ordered)), atol=2e-3)
    assert torch.equal(upper, upper.triu())


def test_compensation_is_that_of_gptq_column_by_column() -> None:
    weight, moments = _problem(rows=5, width=12)
    scales = weight_scales(weight, GRIDS["int4"], 4, "float16")
    scale = scales.start(weight)
    upper, order = inverse_factor(moments)
    found = compensate(weight, upper, order, scale, scales)
    # The same in float64 as the paper has it: the inverse of what is left of H, one elimination a column
    step = scale.double().repeat_interleave(4, 1).numpy()
    damped = moments.double() + 0.01 * moments.double().diagonal().mean() * torch.eye(12)
    free, left, expected = weight.double().numpy().copy(), list(order.numpy()), np.zeros((5, 12))
    while left:
        inverse = np.linalg.inv(damped.numpy()[np.ix_(left, left)])
        k = left[0]
        expected[:, k] = np.clip(np.rint(free[:, k] / step[:, k]), -8, 7)
        error = free[:, k] - expected[:, k] * step[:, k]
        free[:, left] -= np.outer(error, inverse[0] / inverse[0, 0])
        left = left[1:]
    np.testing.assert_array_equal(found.numbers.numpy(), expected)


@pytest.mark.parametrize(("name", "group", "kind"), CASES)
def test_compensation_loses_less_than_rounding_to_the_nearest(
    name: WeightFormat, group: int, kind: ScaleKind
) -> None:
    weight, moments = _problem()
    scales = weight_scales(weight, GRIDS[name], group, kind)
    plain = output_error(weight, nearest(weight, scales.start(weight), scales).weight(), moments).sum()
    searched = scales.search(weight, moments.diagonal())
    upper, order = inverse_factor(moments)
    rounded = compensate(weight, upper, order, searched, scales)
    better = output_error(weight, rounded.weight(), moments).sum()
    assert better < 0.8 * plain
    if scales.adjustable:
        fitted = compensate(weight, upper, order, fit_scales(weight, moments, rounded), scales)
        assert output_error(weight, fitted.weight(), moments).sum() < 1.02 * better


def test_fitted_scales_are_the_least_squares_of_each_row() -> None:
    weight, moments = _problem(rows=3, width=24)
    scales = weight_scales(weight, GRIDS["int4"], 8, "float32")
    rounded = nearest(weight, scales.start(weight), scales)
    found = fit_scales(weight, moments, rounded).double().numpy()
    root = np.linalg.cholesky(moments.double().numpy())  # ‖(w - C·s)·root‖
    for row in range(3):
        codes = np.zeros((24, 3))
        for g in range(3):
            codes[8 * g : 8 * g + 8, g] = rounded.numbers[row, 8 * g : 8 * g + 8].numpy()
        expected = np.linalg.lstsq(root.T @ codes, root.T @ weight[row].double().numpy(), rcond=None)[0]
        np.testing.assert_allclose(found[row], expected, rtol=2e-3)  # the fit is damped by 1e-4


@pytest.mark.parametrize(("name", "group", "kind"), CASES)
def test_a_column_without_inputs_and_a_row_of_zeros_stay_finite(
    name: WeightFormat, group: int, kind: ScaleKind
) -> None:
    weight, moments = _problem()
    weight[3], moments[5], moments[:, 5] = 0, 0, 0
    scales = weight_scales(weight, GRIDS[name], group, kind)
    upper, order = inverse_factor(moments)
    rounded = compensate(weight, upper, order, scales.search(weight, moments.diagonal()), scales)
    if scales.adjustable:
        rounded = compensate(weight, upper, order, fit_scales(weight, moments, rounded), scales)
    assert rounded.weight().isfinite().all()
    assert (rounded.weight()[3] == 0).all()


@pytest.mark.parametrize("width", [1, 7, 8, 50])
def test_second_moments_are_whole_and_symmetric(width: int) -> None:
    inputs = torch.randn(40, width, generator=torch.Generator().manual_seed(width))
    wanted = np.einsum("tk,tj->kj", inputs.double().numpy(), inputs.double().numpy()) / 40
    np.testing.assert_allclose(second_moments(inputs).numpy(), wanted, atol=1e-6)
