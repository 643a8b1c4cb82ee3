"""The matrix products of a source model: which modules they are, and how others take their place.

A linear layer is one; so is each of the two parameters that hold the matrices of a layer's experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from ..graph.capturing.experts import has_interface, parameters_of, through
from ..graph.checkpoint import Checkpoint
from ..graph.streamed import StreamedParameter, read_float32

#: Computes a product in place of a module: (site, x [.., K]) -> y [.., N].
Product = Callable[["Site", Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Site:
    """One matrix product of the model.

    ``name``: the module's ("model.layers.0.mlp.up_proj"), of experts the parameter's; ``stored``: name of the
    tensor behind its weight; ``transposed``: the module keeps [K, N] (transformers' Conv1D); ``shape``:
    [N, K]; ``experts``: so many matrices lie one below the other in it, ``expert``: this one alone.
    """

    name: str
    stored: str
    module: Any
    transposed: bool
    shape: tuple[int, int]
    is_head: bool
    checkpoint: Checkpoint
    parameter: str = "weight"
    experts: int = 0
    expert: int | None = None

    def of_expert(self, expert: int) -> Site:
        """The product of one of the experts."""
        return replace(self, expert=expert, shape=(self.shape[0] // self.experts, self.shape[1]))

    @property
    def rows(self) -> slice:
        """Which rows of the stored matrix these are."""
        first = (self.expert or 0) * self.shape[0]
        return slice(first, first + self.shape[0])

    def weight(self) -> Tensor:
        """The weight [N, K] in float32; read from the checkpoint where the model does not hold it."""
        parameter = getattr(self.module, self.parameter)
        if self.expert is not None:
            found = parameter[self.expert].detach().float()
        elif isinstance(parameter, StreamedParameter):
            found = read_float32(self.checkpoint, parameter.stored)
        else:
            found = parameter.detach().float()
        found = found.mT if self.transposed else found
        result: Tensor = found.reshape(self.shape).contiguous()
        return result

    def bias(self) -> Tensor | None:
        """The bias [N], or None."""
        name = f"{self.parameter}_bias" if self.experts else "bias"
        found = getattr(self.module, name, None)
        if not isinstance(found, Tensor):
            return None
        return found.detach() if self.expert is None else found.detach()[self.expert]


def find_sites(model: Any, checkpoint: Checkpoint) -> list[Site]:
    """Every linear layer of ``model``, in the order of its modules; the output head is told apart."""
    head = model.get_output_embeddings()
    sites = []
    for name, module in model.named_modules():
        transposed = isinstance(module, Conv1D)
        if not transposed and type(module) is not nn.Linear:
            continue
        rows, columns = (int(size) for size in module.weight.shape)
        shape = (columns, rows) if transposed else (rows, columns)
        stored = checkpoint.resolve(f"{name}.weight").name
        sites.append(Site(name, stored, module, transposed, shape, module is head, checkpoint))
    return sites


def find_experts(model: Any, checkpoint: Checkpoint) -> list[Site]:
    """The matrices of every layer's experts, a site for each parameter that holds them."""
    sites = []
    for path, module in model.named_modules():
        if not has_interface(module):
            continue
        for parameter in parameters_of(module):
            experts, rows, columns = (int(size) for size in getattr(module, parameter).shape)
            if module.is_transposed:
                rows, columns = columns, rows
            name, shape = f"{path}.{parameter}", (experts * rows, columns)
            stored = checkpoint.resolve(name).name
            site = Site(name, stored, module, module.is_transposed, shape, False, checkpoint)
            sites.append(replace(site, parameter=parameter, experts=experts))
    return sites


def _run_experts(
    module: Any, own: dict[str, Site], product: Product, x: Tensor, expert_ids: Tensor, weights: Tensor
) -> Tensor:
    """The forward of experts, expert by expert, with ``product`` for the parameters in ``own``."""

    def multiply(expert: int, parameter: str, rows: Tensor) -> Tensor:
        if parameter in own:
            return product(own[parameter].of_expert(expert), rows)
        matrix = getattr(module, parameter)[expert]
        bias = getattr(module, f"{parameter}_bias")[expert] if module.has_bias else None
        return functional.linear(rows, matrix.T if module.is_transposed else matrix, bias)

    out = torch.zeros_like(x)
    for expert in torch.unique(expert_ids).tolist():
        token, pick = torch.where(expert_ids == expert)
        y = through(module, x[token], partial(multiply, expert))
        out.index_add_(0, token, y * weights[token, pick, None])
    return out


@contextmanager
def replaced(sites: list[Site], product: Product) -> Iterator[None]:
    """Let ``product`` compute the products of ``sites``, those of experts one expert at a time; the modules
    are as before afterwards.
    """

    def bound(site: Site) -> Callable[[Tensor], Tensor]:
        return lambda x: product(site, x)

    experts: dict[Any, dict[str, Site]] = {}
    for site in sites:  # an instance's own forward, undone below
        if site.experts:
            experts.setdefault(site.module, {})[site.parameter] = site
        else:
            site.module.forward = bound(site)
    for module, own in experts.items():
        module.forward = partial(_run_experts, module, own, product)
    try:
        yield
    finally:
        for module in {site.module for site in sites}:
            del module.forward


@dataclass(frozen=True, eq=False)
class InputGroup:
    """Sites that multiply the very same input; ``normed``: it is what a norm puts out, and nothing else is
    made of it, so that scales of its channels can go into the norm.
    """

    sites: tuple[Site, ...]
    normed: bool

    @property
    def is_head(self) -> bool:
        """Whether this is the output projection."""
        return self.sites[0].is_head


def input_groups(model: Any, sites: list[Site], experts: list[Site]) -> list[InputGroup]:
    """The groups of linear layers in the order in which the model comes to them.

    Found by a pass over two tokens whose products, those of ``experts`` too, are zeros, so that no weight is
    read.
    """
    groups: list[tuple[list[Site], Tensor]] = []
    norms: list[Any] = []

    def product(site: Site, x: Tensor) -> Tensor:
        if site.experts:
            return x.new_zeros(*x.shape[:-1], site.shape[0])
        if groups and groups[-1][1] is x:
            groups[-1][0].append(site)
        else:
            groups.append(([site], x))
        return x.new_zeros(*x.shape[:-1], site.shape[0])

    hooks = [
        module.register_forward_hook(lambda _module, _inputs, output: norms.append(output))
        for module in model.modules()
        if type(module).__name__.endswith("Norm")
    ]
    try:
        with replaced([*sites, *experts], product), torch.no_grad():
            model(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    # All tensors are alive until here, so equal identity is the same tensor.
    made = {id(output) for output in norms}
    return [InputGroup(tuple(sites), id(x) in made) for sites, x in groups]
