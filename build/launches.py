"""From a tactic's launches to the program's: kernels by index, weights by name, strides and alignment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

from castiron.errors import BuildError

from ..engines.program import ITEM_BYTES, Arg, GridDim, Launch, StepInput, Symbol, When
from ..plugins import Call
from ..plugins.launch import CudaKernel, HostKernel, KernelLaunch, Param, TritonKernel
from .steps import StepList
from .weight_table import WeightTable

ParamType = Literal["ptr", "i32", "i64", "f32"]
#: Addresses and numbers that are multiples of this let a kernel move 16 bytes at a time.
_ALIGNMENT = 16
_TYPE_OF: Mapping[str, ParamType] = {
    **dict.fromkeys(("value", "weight", "adapter", "input", "k_cache", "v_cache"), "ptr"),
    **dict.fromkeys(("row_stride", "size", "i32"), "i32"),
    "i64": "i64",
    "f32": "f32",
}
_TRITON_TYPES: Mapping[str, ParamType] = {"i32": "i32", "i64": "i64", "fp32": "f32"}


@dataclass(frozen=True)
class KernelRequest:
    """A kernel to compile: what a tactic asked for, with the alignment of its arguments filled in."""

    kernel: TritonKernel | CudaKernel | HostKernel

    @property
    def label(self) -> str:
        """For people: the function's name."""
        if isinstance(self.kernel, TritonKernel):
            return str(self.kernel.function.__name__)
        return self.kernel.function

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for requests that compile to the same code."""
        kernel = self.kernel
        if not isinstance(kernel, TritonKernel):
            return (kernel,)
        return (
            id(kernel.function),
            tuple(kernel.types.items()),
            tuple((name, type(value), repr(value)) for name, value in kernel.constants.items()),
            kernel.aligned,
            kernel.num_warps,
            kernel.num_stages,
            kernel.hot,
        )


def param_types(kernel: TritonKernel | CudaKernel | HostKernel) -> tuple[ParamType, ...]:
    """What the arguments of a launch are. Raises BuildError for a type that launches cannot pass."""
    if isinstance(kernel, CudaKernel):
        return kernel.params
    if isinstance(kernel, HostKernel):
        return ()  # a host call hands over every operand (plugins/include/castiron_plugin.h)
    kinds: list[ParamType] = []
    for name, kind in kernel.types.items():
        known = "ptr" if kind.startswith("*") else _TRITON_TYPES.get(kind)
        if known is None:
            raise BuildError(
                f"kernel {kernel.function.__name__!r}: parameter {name!r} has type {kind!r}; expected a "
                f"pointer or one of {', '.join(_TRITON_TYPES)}"
            )
        kinds.append(known)
    return tuple(kinds)


class LaunchTable:
    """Resolves the launches of a finished StepList and numbers the kernels that they need."""

    def __init__(self, steps: StepList, weights: WeightTable) -> None:
        self._steps, self._weights = steps, weights
        self._numbers: dict[tuple[object, ...], int] = {}
        self._requests: list[KernelRequest] = []

    @property
    def requests(self) -> tuple[KernelRequest, ...]:
        """The kernels by number."""
        return tuple(self._requests)

    def of(self, call: Call, launches: Sequence[KernelLaunch]) -> list[Launch]:
        """``launches`` of a step. Raises BuildError naming the kernel when arguments do not fit it."""
        return [self._launch(call, launch) for launch in launches]

    def _launch(self, call: Call, launch: KernelLaunch) -> Launch:
        request = KernelRequest(launch.kernel)
        types = param_types(launch.kernel)
        given = tuple(_TYPE_OF.get(arg.kind, arg.kind) for arg in launch.args)
        if given != types:
            raise BuildError(
                f"{call.kernel}: the launch of kernel {request.label!r} gives arguments {', '.join(given)}; "
                f"its parameters are {', '.join(types)}"
            )
        args = [self._arg(call, arg) for arg in launch.args]
        if isinstance(launch.kernel, TritonKernel):
            known = {
                name
                for name, param, arg in zip(launch.kernel.types, launch.args, args, strict=True)
                if self._is_aligned(param, arg)
            }
            request = KernelRequest(replace(launch.kernel, aligned=launch.kernel.aligned | known))
        number = self._numbers.setdefault(request.key, len(self._requests))
        if number == len(self._requests):
            self._requests.append(request)
        when = launch.when
        return Launch(
            kernel=number,
            grid=[GridDim(of=dim.of, per=dim.per, times=dim.times, per_sm=dim.per_sm) for dim in launch.grid],
            args=args,
            when=None if when is None else When(of=when.of, low=when.low, high=when.high),
        )

    def _arg(self, call: Call, arg: Param) -> Arg:
        match arg.kind:
            case "value":
                return Arg(value=str(arg.of))
            case "row_stride":
                return Arg(i32=self._steps.row_stride(str(arg.of)))
            case "weight":
                if not isinstance(arg.of, int) or not 0 <= arg.of < len(call.weights):
                    raise BuildError(f"{call.kernel} has {len(call.weights)} weights; found index {arg.of}")
                return Arg(weight=self._weights.name_of(call.weights[arg.of]))
            case "input":
                if arg.of not in get_args(StepInput):
                    raise BuildError(
                        f"{call.kernel} reads step input {arg.of!r}; expected one of "
                        f"{', '.join(get_args(StepInput))}"
                    )
                return Arg(input=cast("StepInput", arg.of))
            case "size":
                return Arg(size=cast("Symbol", arg.of))
            case "f32":
                return Arg(f32=float(arg.of))
            case kind:
                return Arg.model_validate({kind: int(arg.of)})

    def _is_aligned(self, param: Param, arg: Arg) -> bool:
        """Whether an address or number is a multiple of 16 in every step."""
        if arg.value is not None:
            placed = self._steps.placed(arg.value)
            return placed.column * ITEM_BYTES[placed.dtype] % _ALIGNMENT == 0
        if arg.i32 is not None or arg.i64 is not None:
            return int(arg.i32 or arg.i64 or 0) % _ALIGNMENT == 0
        return _TYPE_OF[param.kind] == "ptr"
