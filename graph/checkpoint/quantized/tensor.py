"""A parameter that is made of stored tensors: numbers to whoever asks for them, a few nodes to the graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from castiron.errors import CheckpointError

from ...quant_plan import ActivationFormat
from ..safetensors_file import TensorInfo
from .expression import Value, arithmetic, concat, reshape, stored

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
class MadeTensor:
    """A parameter that a checkpoint stores as codes, or expert by expert.

    Attributes:
        name: of the parameter, as the checkpoint would call it unquantized and whole ("...q_proj.weight").
        weight: [N, K] or [E, N, K], what (x * input_scale) is multiplied with; float32 where it is codes.
        input_scale: [K], or None: x as it is.
        rounding: of x, after ``input_scale``.
        also: stored tensors that were understood and are not part of ``weight``.
        kind: for people: "int4", "fp8", "bfloat16".
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
        """[N, K] or [E, N, K]."""
        return self.weight.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the numbers; float32 where they are codes."""
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

    @classmethod
    def of_experts(cls, name: str, experts: Sequence[Sequence[TensorInfo | MadeTensor]]) -> MadeTensor:
        """The parameter [E, N, K] of a layer's experts: those of one are the rows of its matrices in turn.

        Raises ``CheckpointError`` where experts differ in shape or in how they are quantized.
        """
        parts = [part for expert in experts for part in expert]
        first = [part.shape for part in experts[0]]
        for index, expert in enumerate(experts):
            shapes = [part.shape for part in expert]
            if shapes != first or any(len(shape) != 2 or shape[1] != first[0][1] for shape in shapes):
                raise CheckpointError(
                    f"expert {index} of {name!r} has matrices of shapes {[list(shape) for shape in shapes]}, "
                    f"expert 0 {[list(shape) for shape in first]}; expected equal ones with equal inputs."
                )
        made = [part for part in parts if isinstance(part, MadeTensor)]
        roundings = {part.rounding for part in made} | ({NOT_ROUNDED} if len(made) < len(parts) else set())
        # Static scales of single experts become the largest of them, under which none saturates.
        largest = max(rounding.x_scale for rounding in roundings)
        if len({replace(rounding, x_scale=bool(rounding.x_scale)) for rounding in roundings}) > 1:
            raise CheckpointError(
                f"experts of {name!r} round their inputs differently ({', '.join(map(str, roundings))}); one "
                "product has one rounding."
            )
        rounding = replace(roundings.pop(), x_scale=largest)
        value = concat([part.value if isinstance(part, MadeTensor) else stored(part) for part in parts])
        shape = (len(experts), value.shape[0] // len(experts), value.shape[1])
        kinds = {part.kind if isinstance(part, MadeTensor) else part.dtype.name for part in parts}
        also = tuple(tensor for part in made for tensor in part.also)
        return cls(name, reshape(value, shape), ", ".join(sorted(kinds)), rounding=rounding, also=also)

    @cached_property
    def expr(self) -> WeightExpr:
        """The numbers of ``value``, made row range by row range."""
        from .to_nodes import weight_expr

        return weight_expr(self.value)
