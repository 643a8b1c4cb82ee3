"""Plans of quantization for small graphs, made by the simplest rules, with their tensors in a real file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from castiron.graph.evaluate import read_external
from castiron.graph.quant_plan import LinearPlan, QuantPlan, TensorRef

Array = np.ndarray[Any, Any]

#: Largest code of each format: a group's largest number becomes it.
LARGEST = {"int8": 127.0, "int4": 7.0, "fp8": 448.0, "fp4": 6.0}


class TensorFile:
    """Arrays one after the other in a file, each as a TensorRef."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._end = 0

    def add(self, name: str, array: Array) -> TensorRef:
        array = np.ascontiguousarray(array)
        with open(self.file, "ab") as out:
            out.write(array.tobytes())
        ref = TensorRef(name, self.file, self._end, array.dtype, array.shape)
        self._end += array.nbytes
        return ref


def groups_of(matrix: Array, group: int) -> Iterable[tuple[int, slice]]:
    """(index of the group, its columns)."""
    width = matrix.shape[1]
    size = group or width
    return ((g, slice(g * size, min(width, (g + 1) * size))) for g in range(-(-width // size)))


def largest_scales(matrix: Array, format: str, group: int) -> Array:
    """float32 [N, G]: the largest magnitude of each group over the largest code."""
    columns = [np.abs(matrix[:, cut]).max(1) / LARGEST[format] for _, cut in groups_of(matrix, group)]
    return np.stack(columns, 1).astype(np.float32)


def rounded(matrix: Array, scale: Array, format: str, group: int) -> Array:
    """float64 [N, K]: what codes of ``matrix`` stand for, by ml_dtypes and numpy."""
    out = np.empty(matrix.shape, np.float64)
    for g, cut in groups_of(matrix, group):
        step = scale[:, g, None].astype(np.float32)
        numbers = matrix[:, cut].astype(np.float32) / np.where(step == 0, 1, step)
        if format in ("int8", "int4"):
            low, high = (-128, 127) if format == "int8" else (-8, 7)
            codes = np.clip(np.rint(numbers), low, high)
        else:
            kind = ml_dtypes.float8_e4m3fn if format == "fp8" else ml_dtypes.float4_e2m1fn
            limit = np.float32(LARGEST[format])
            codes = np.clip(numbers, -limit, limit).astype(kind).astype(np.float32)
        out[:, cut] = codes.astype(np.float64) * step
    return out


def weights_of(model: onnx.ModelProto) -> dict[str, Array]:
    """The external initializers, by name."""
    external = onnx.TensorProto.EXTERNAL
    return {t.name: read_external(t) for t in model.graph.initializer if t.data_location == external}


def plan_of(
    weights: Mapping[str, Array],
    names: Iterable[str],
    file: Path,
    format: str,
    group: int,
    half: bool = False,
    **rest: Any,
) -> tuple[QuantPlan, dict[str, Array]]:
    """The plan that rounds the named weights, and what they become."""
    tensors = TensorFile(file)
    linears, after = {}, {}
    for name in names:
        scale = largest_scales(weights[name], format, group)
        stored = scale.astype(np.float16) if half else scale
        after[name] = rounded(weights[name], stored.astype(np.float32), format, group)
        ref = tensors.add(f"{name}.scale", stored)
        linears[name] = LinearPlan(format=format, group=group, scale=ref, **rest)  # type: ignore[arg-type]
    return QuantPlan(linears), after
