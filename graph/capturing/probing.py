"""Running a module or function of the model on real numbers while, or before, it is being traced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

#: Largest difference, relative to the largest value, at which two float32 computations count as the same.
TOLERANCE = 2e-6


@contextmanager
def real_tensors() -> Iterator[torch.Generator]:
    """Suspends tracing and fake tensors; yields a seeded generator for probe inputs."""
    with disable_proxy_modes_tracing(), unset_fake_temporarily(), torch.no_grad():
        yield torch.Generator().manual_seed(20)


def same(got: object, expected: Tensor) -> bool:
    """Whether ``got`` is a tensor of ``expected``'s shape and, up to rounding, its values."""
    if not isinstance(got, Tensor) or got.shape != expected.shape or not torch.isfinite(got).all():
        return False
    bound = TOLERANCE * max(1.0, float(expected.abs().max()))
    return float((got.double() - expected.double()).abs().max()) <= bound


def with_parameters(module: nn.Module, parameters: dict[str, Tensor]) -> nn.Module:
    """A copy of ``module`` (which has no children) that holds the given real parameters."""
    twin = type(module).__new__(type(module))
    nn.Module.__init__(twin)
    state = {k: v for k, v in module.__dict__.items() if k not in ("_parameters", "forward")}
    twin.__dict__.update(state)
    twin.__dict__["_parameters"] = {
        name: nn.Parameter(parameters[name], requires_grad=False) if name in parameters else None
        for name in module._parameters
    }
    return twin
