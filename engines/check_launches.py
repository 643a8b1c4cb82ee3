"""Checks of kernels and launches: what a damaged or hand-made program must not bring to a GPU."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NoReturn, get_args

from .program import Arg, GridDim, Kernel, Launch, Program, Step, StepInput, Value

_STEP_INPUTS = get_args(StepInput)
#: Symbols and inputs that steps of ``Program.sampling`` and ``Program.feeding`` alone may use.
_SAMPLING_ONLY = frozenset(("R", "E", "L", "V", *_STEP_INPUTS[_STEP_INPUTS.index("token_source") :]))
#: Those of launches that add adapters.
_ADAPTER_ONLY = frozenset(("A", "B", "lora_rows", "lora_slots", "logit_lora_rows", "logit_lora_slots"))
_WHO = {True: "sampling", False: "what adds adapters"}
#: Inputs that say where the blocks of a cache are, and whether they are those of layers with a window.
_TABLES = {"slots": False, "block_table": False, "window_slots": True, "window_table": True}
#: Most blocks in each dimension of a grid (CUDA C++ programming guide, technical specifications).
_MOST_BLOCKS = (2**31 - 1, 65535, 65535)
#: What a kernel may take an operand for: codes are also bytes, those of four bits in words too.
_TRITON_TYPES = {
    "f32": ("*fp32",),
    "bf16": ("*bf16",),
    "f16": ("*fp16",),
    "i32": ("*i32",),
    "i8": ("*i8",),
    "u8": ("*u8",),
    "f8e4m3": ("*fp8e4nv", "*u8"),
    "i4": ("*u32", "*u8"),
    "f4e2m1": ("*u32", "*u8"),
}
_KNOWN_TYPES = frozenset(kind for kinds in _TRITON_TYPES.values() for kind in kinds)
_Fail = Callable[..., NoReturn]


def check_kernels(program: Program, images: Collection[str], fail: _Fail) -> None:
    """Names, images and parameters of ``program.kernels``; ``images``: entries of rank0.engine."""
    on_host = program.target == "host"
    if on_host != (program.prefill_tile == 0):
        fail("has query tiles of {} rows, which does not fit the target", program.prefill_tile)
    if len({kernel.name for kernel in program.kernels}) != len(program.kernels):
        fail("lists a kernel twice")
    wants_ptx = program.target.startswith("compute_")
    for kernel in program.kernels:
        for entry in (kernel.image, kernel.ptx):
            if entry and (entry not in images or not entry.startswith(f"{program.target}/kernels/")):
                fail("kernel {!r} refers to {!r}, which rank0.engine lacks", kernel.name, entry)
        if not (kernel.ptx if wants_ptx else kernel.image):
            fail("kernel {!r} has no {}", kernel.name, "PTX" if wants_ptx else "machine code")
        if kernel.types and not _types_fit(kernel):
            fail("kernel {!r} has types that contradict its parameters", kernel.name)
        if kernel.scratch_bytes and not kernel.hidden_pointers:
            fail("kernel {!r} wants scratch and has no parameter for its address", kernel.name)


def _types_fit(kernel: Kernel) -> bool:
    kinds = ["ptr" if kind.startswith("*") else kind.replace("fp32", "f32") for kind in kernel.types]
    return kinds == list(kernel.params)


class LaunchChecker:
    """Checks the launches of one step after the other."""

    def __init__(
        self, program: Program, values: Mapping[str, Value], most: Mapping[str, int], fail: _Fail
    ) -> None:
        self._program, self._values, self._most, self._fail = program, values, most, fail
        self._weights = {weight.name: weight.dtype for weight in program.weights}

    def check(self, step: Step, where: str, fed: Collection[str], *, sampling: bool) -> None:
        """``fed``: values that lie in the step's input block, which every launch may read."""
        if not step.launches:
            self._fail("{} launches nothing", where)
        known = {*step.inputs, *step.outputs, *fed}
        self._check(
            step, step.launches, where, known, _ADAPTER_ONLY if sampling else _ADAPTER_ONLY | _SAMPLING_ONLY
        )

    def check_adapted(self, step: Step, where: str, fed: Collection[str]) -> None:
        """The launches that add adapters."""
        beside = [] if step.adapter is None else step.adapter.operands
        known = {*step.inputs, *step.outputs, *beside, *fed}
        self._check(step, step.adapted, where, known, _SAMPLING_ONLY)

    def _check(
        self,
        step: Step,
        launches: Sequence[Launch],
        where: str,
        known: Collection[str],
        others: frozenset[str],
    ) -> None:
        """``known``: values that arguments may name. ``others``: symbols and inputs of other launches."""
        for launch in launches:
            if launch.kernel >= len(self._program.kernels):
                self._fail("{} launches kernel {} of {}", where, launch.kernel, len(self._program.kernels))
            self._check_counts(launch, where, others)
            self._check_grid(launch.grid, where)
            kernel = self._program.kernels[launch.kernel]
            if len(launch.args) != len(kernel.params):
                self._fail(
                    "{} gives kernel {!r} {} arguments; it takes {}",
                    *(where, kernel.name, len(launch.args), len(kernel.params)),
                )
            types = kernel.types or [""] * len(launch.args)
            for arg, param, kind in zip(launch.args, kernel.params, types, strict=True):
                self._check_arg(arg, param, kind, step, known, where)
                if arg.input in others or (arg.adapter is not None and "A" in others):
                    what = f"reads {arg.input!r}" if arg.input else "names an adapter"
                    self._fail("{} {}, which only {} has", where, what, _WHO[arg.input in _SAMPLING_ONLY])
            self._check_tables(launch, where)

    def _check_tables(self, launch: Launch, where: str) -> None:
        """Layers with a window lie in blocks of their own, which two inputs of their own name."""
        layers = self._program.kv_layers
        named = [index for arg in launch.args for index in (arg.k_cache, arg.v_cache) if index is not None]
        windows = {layers[index].window > 0 for index in named} or {False}
        for arg in launch.args:
            if arg.input in _TABLES and windows != {_TABLES[arg.input]}:
                self._fail(
                    "{} reads {!r}, which does not say where the blocks of its cache layers {} are",
                    *(where, arg.input, sorted(set(named))),
                )

    def _check_counts(self, launch: Launch, where: str, others: frozenset[str]) -> None:
        when = launch.when
        named = {dim.of for dim in launch.grid} | {arg.size for arg in launch.args}
        named |= {when.of} if when is not None else set()
        unknown = {symbol for symbol in named if symbol is not None and symbol not in self._most}
        unknown |= {symbol for symbol in named if symbol in others}
        if unknown:
            self._fail("{} counts {}, which it cannot know", where, ", ".join(sorted(map(str, unknown))))
        if when is not None and when.low > when.high:
            self._fail("{} has a launch for {} from {} to {}", where, when.of, when.low, when.high)

    def _check_grid(self, grid: Sequence[GridDim], where: str) -> None:
        for dim, most in zip(grid, _MOST_BLOCKS, strict=False):
            count = 1 if dim.of is None else self._most[dim.of]
            blocks = dim.times * -(-count // dim.per)
            if blocks > most and not dim.per_sm:
                self._fail("{} may launch {} blocks in a dimension that takes {}", where, blocks, most)

    def _check_arg(
        self, arg: Arg, param: str, kind: str, step: Step, known: Collection[str], where: str
    ) -> None:
        given = arg.model_dump(exclude_none=True)
        if len(given) != 1:
            self._fail("{} has an argument that is {}", where, " and ".join(given) or "nothing")
        (name,) = given
        expected = {"size": "i32", "i32": "i32", "i64": "i64", "f32": "f32"}.get(name, "ptr")
        if expected != param:
            self._fail("{} gives {} where the kernel takes {}", where, name, param)
        layers = self._program.kv_layers
        layer = arg.k_cache if arg.k_cache is not None else arg.v_cache
        if layer is not None and layer >= len(layers):
            self._fail("{} names cache layer {} of {}", where, layer, len(layers))
        slots = self._program.adapters
        if arg.adapter is not None and (slots is None or arg.adapter >= slots.slot_bytes):
            self._fail("{} gives byte {} of an adapter, which no slot has", where, arg.adapter)
        dtype: str | None = None
        if arg.value is not None:
            if arg.value not in known or arg.value not in self._values:
                self._fail("{} gives {!r}, which is no operand of it", where, arg.value)
            dtype = self._values[arg.value].dtype
        elif arg.weight is not None:
            if arg.weight not in step.weights or arg.weight not in self._weights:
                self._fail("{} gives weight {!r}, which is no operand of it", where, arg.weight)
            dtype = self._weights[arg.weight]
        if dtype is not None and kind in _KNOWN_TYPES and kind not in _TRITON_TYPES[dtype]:
            self._fail("{} gives {} of {} where the kernel takes {}", where, given[name], dtype, kind)
