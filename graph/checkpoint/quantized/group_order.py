"""Inputs that were quantized in another order than they are stored in (act-order): g_idx."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from castiron.errors import CheckpointError

from .module import Module


def group_order(module: Module, suffix: str, inputs: int, width: int) -> npt.NDArray[Any] | None:
    """The inputs in the order of their groups; None where they are stored in it.

    The stored tensor says the group of each input. Every group must have ``width`` inputs, the last may be
    shorter: then sorting the codes' columns makes neighbours of the inputs that share a scale.
    """
    tensor = module.take(suffix, ("int32", "int64"), (inputs,))
    groups = module.array(tensor).astype(np.int64)
    if (groups == -1).all():  # compressed-tensors: never filled in
        return None
    order = np.argsort(groups, kind="stable")
    if not np.array_equal(groups[order], np.arange(inputs) // width):
        raise CheckpointError(
            f"tensor {tensor.name!r} does not give each of {-(-inputs // width)} groups {width} inputs; "
            "groups of unequal size are not read."
        )
    return None if np.array_equal(order, np.arange(inputs)) else order
