"""Reading FX nodes: arguments by schema name, and the checks that keep tokens apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from castiron.errors import UnsupportedModelError

from .emitter import Emitter


def arguments(node: fx.Node) -> dict[str, Any]:
    """The node's arguments by the names in its op's schema, defaults included."""
    schema = node.target._schema  # type: ignore[union-attr]
    values = {argument.name: argument.default_value for argument in schema.arguments}
    positional = [argument.name for argument in schema.arguments]
    values.update(zip(positional, node.args, strict=False))
    values.update(node.kwargs)
    return values


def is_tensor(node: object) -> bool:
    """Whether an argument is a node that carries a tensor."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), Tensor)


def rank(node: fx.Node) -> int:
    """Number of dimensions of the node's tensor."""
    return int(node.meta["val"].ndim)


def axis(node: fx.Node, dim: int) -> int:
    """``dim`` of the node's tensor, counted from the front."""
    return dim % max(1, rank(node))


def static_size(e: Emitter, user: fx.Node, source: fx.Node, dim: int) -> int:
    """Size of ``source`` along ``dim``; refuses ``user`` if that is the token axis.

    An op that runs along the token axis lets one request's tokens reach another's, and a token's result
    depend on what else is in the step.
    """
    size = e.shape(source)[axis(source, dim)]
    if isinstance(size, str):
        raise UnsupportedModelError(
            f"{e.path(user) or 'the model'} computes {user.target} along the token axis (size {size}); "
            f"outside attention, tokens must not mix: requests share a step"
        )
    return size


def refuse(e: Emitter, node: fx.Node, reason: str) -> UnsupportedModelError:
    """The error for a node that cannot be translated."""
    return UnsupportedModelError(f"{e.path(node) or 'the model'} computes {node.target}: {reason}")


def element_type(node: fx.Node) -> torch.dtype:
    """torch dtype of the node's tensor."""
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype
