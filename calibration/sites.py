"""The matrix products of a source model: which modules they are, and how others take their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..graph.checkpoint import Checkpoint
from ..graph.streamed import StreamedParameter, read_float32

#: Computes a product in place of a module: (site, x [.., K]) -> y [.., N].
Product = Callable[["Site", Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Site:
    """One matrix product of the model.

    ``name``: the module's ("model.layers.0.mlp.up_proj"); ``stored``: name of the tensor behind its weight;
    ``transposed``: the module keeps [K, N] (transformers' Conv1D); ``shape``: [N, K].
    """

    name: str
    stored: str
    module: Any
    transposed: bool
    shape: tuple[int, int]
    is_head: bool
    checkpoint: Checkpoint

    def weight(self) -> Tensor:
        """The weight [N, K] in float32; read from the checkpoint where the model does not hold it."""
        parameter = self.module.weight
        if isinstance(parameter, StreamedParameter):
            found = read_float32(self.checkpoint, parameter.stored)
        else:
            found = parameter.detach().float()
        return found.T.contiguous() if self.transposed else found

    def bias(self) -> Tensor | None:
        """The bias [N], or None."""
        found = self.module.bias
        return found.detach() if isinstance(found, Tensor) else None


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


@contextmanager
def replaced(sites: list[Site], product: Product) -> Iterator[None]:
    """Let ``product`` compute the products of ``sites``; the modules are as before afterwards."""

    def bound(site: Site) -> Callable[[Tensor], Tensor]:
        return lambda x: product(site, x)

    for site in sites:
        site.module.forward = bound(site)  # an instance's own, undone below
    try:
        yield
    finally:
        for site in sites:
            del site.module.forward


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


def input_groups(model: Any, sites: list[Site]) -> list[InputGroup]:
    """The groups in the order in which the model comes to them.

    Found by a pass over two tokens whose products are zeros, so that no weight is read.
    """
    groups: list[tuple[list[Site], Tensor]] = []
    norms: list[Any] = []

    def product(site: Site, x: Tensor) -> Tensor:
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
        with replaced(sites, product), torch.no_grad():
            model(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    # All tensors are alive until here, so equal identity is the same tensor.
    made = {id(output) for output in norms}
    return [InputGroup(tuple(sites), id(x) in made) for sites, x in groups]
