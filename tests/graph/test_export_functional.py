"""In-place ops of model code: rewritten where that is plain, left to torch where views are involved."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from castiron.graph.export.functional import functional
from torch import Tensor, nn

from castiron.errors import UnsupportedModelError


class _Module(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        return self._function(x)


def _before_and_after(x: Tensor) -> Tensor:
    y = x * 2
    before = y + 1
    y.add_(x)
    y.clamp_(max=3.0)
    return before * y


def _through_a_view(x: Tensor) -> Tensor:
    y = x * 2
    half = y[:2]
    y.mul_(3)
    return half + y[2:]


@pytest.mark.parametrize("function", [_before_and_after, _through_a_view])
def test_the_program_without_in_place_ops_computes_the_same(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.tensor([1.0, -2.0, 0.5, 4.0])
    program = functional(torch.export.export(_Module(function), (x,)))
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert not [target for target in targets if target.split(".")[1].endswith("_")]
    program.graph_module.recompile()
    torch.testing.assert_close(program.module()(x), function(x), rtol=0, atol=0)


class _Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.Buffer(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(1)
        return x + self.steps


def test_a_model_that_keeps_state_in_a_buffer_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="steps"):
        functional(torch.export.export(_Counter(), (torch.ones(2),)))
