"""A quantized parameter: a float32 matrix to whoever asks for numbers, codes and scales to the graph."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...quant_plan import ActivationFormat
from ..safetensors_file import TensorInfo
from .expression import Value, arithmetic

if TYPE_CHECKING:
    from ...weights import WeightExpr


@dataclass(frozen=True)
class Rounding:
    """What a product rounds its x to; see ``graph.quant_plan.LinearPlan``."""

    x_format: ActivationFormat = ""
    x_group: int = 0
    x_scale: float = 0.0


NOT_ROUNDED = Rounding()


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A parameter that a checkpoint stores as codes.

    Attributes:
        name: of the parameter, as the checkpoint would call it unquantized ("...q_proj.weight").
        weight: float32 [N, K], what (x * input_scale) is multiplied with.
        input_scale: [K], or None: x as it is.
        rounding: of x, after ``input_scale``.
        also: stored tensors that were understood and are not part of ``weight``.
        kind: for people: "int4", "fp8".
    """

    name: str
    weight: Value
    kind: str
    input_scale: Value | None = None
    rounding: Rounding = NOT_ROUNDED
    also: tuple[TensorInfo, ...] = field(default=())

    @property
    def value(self) -> Value:
        """The whole parameter, the input scale taken into its columns."""
        if self.input_scale is None:
            return self.weight
        return arithmetic("Mul", self.weight, self.input_scale)

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, K]."""
        return self.weight.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """float32."""
        return self.weight.dtype

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Size in bytes, were it all in memory."""
        return self.size * self.dtype.itemsize

    @cached_property
    def sources(self) -> tuple[TensorInfo, ...]:
        """Every stored tensor that the parameter accounts for."""
        inner = [*self.weight.tensors(), *(self.input_scale.tensors() if self.input_scale else ())]
        return tuple({tensor.name: tensor for tensor in (*inner, *self.also)}.values())

    @property
    def file(self) -> Path:
        """A file that holds a part of it, for messages."""
        return self.sources[0].file

    @property
    def offset(self) -> int:
        """0: the parameter as a whole lies nowhere."""
        return 0

    @cached_property
    def expr(self) -> WeightExpr:
        """The numbers of ``value``, made row range by row range."""
        from .to_nodes import weight_expr

        return weight_expr(self.value)
