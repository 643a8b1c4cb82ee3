"""Cross-checks of a program that its schema cannot express: names, references, places in the arena."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import NoReturn

from castiron.errors import EngineError

from .check_launches import LaunchChecker, check_kernels
from .cuda_layout import PART_ALIGNMENT
from .kernels import KERNELS, NATIVE, PRODUCTS, attr_fits
from .program import ITEM_BYTES, PROGRAM_FORMAT, Program, Step, Value, Weight
from .symbols import largest_counts
from .weights_file import ALIGNMENT, CODES, MATRIX_DTYPES, TensorEntry, layout_bytes

_FED = {"token_ids": ("i32", ["T"]), "positions": ("i32", ["T"]), "logit_rows": ("i32", ["N"])}
#: What sampling leaves for the runtime (docs/cuda-program.md, "Sampling"): dtype and columns.
_SAMPLED = {"sampled": ("i32", 2), "sample_top_ids": ("i32", 20), "sample_top_logprobs": ("f32", 21)}


def check_program(program: Program, tensors: Mapping[str, TensorEntry], images: Collection[str] = ()) -> None:
    """Raise EngineError unless ``program`` is consistent in itself, with the tensors of the engine and with
    its kernels' images, given as names of entries.
    """
    _Checker(program).run(tensors, images)


class _Checker:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.values: dict[str, Value] = {}
        self.on_gpu = program.target != "host"
        self.most: Mapping[str, int] = largest_counts(
            program.limits, program.vocab_size, program.prefill_tile
        )
        self.module_inputs: dict[str, int] = {}
        self.launches = LaunchChecker(program, self.values, self.most, self.fail)

    def run(self, tensors: Mapping[str, TensorEntry], images: Collection[str]) -> None:
        program = self.program
        if program.format[0] != PROGRAM_FORMAT[0] or not 0 <= program.format[1] <= PROGRAM_FORMAT[1]:
            self.fail(
                "has format {0}.{1}; this castiron reads {2}.0 to {2}.{3}. Rebuild it",
                *program.format,
                *PROGRAM_FORMAT,
            )
        for value in program.values:
            if value.name in self.values:
                self.fail("has two values named {!r}", value.name)
            self.values[value.name] = value
        for value in program.values:
            self.check_place(value)
        self.check_weights(tensors)
        check_kernels(program, images, self.fail)
        self.check_steps({weight.name for weight in program.weights})

    def check_weights(self, tensors: Mapping[str, TensorEntry]) -> None:
        if len({weight.name for weight in self.program.weights}) != len(self.program.weights):
            self.fail("lists a weight twice")
        for weight in self.program.weights:
            self.check_weight(weight, tensors.get(weight.name))

    def check_weight(self, weight: Weight, entry: TensorEntry | None) -> None:
        if weight.layout == "plain":
            if weight.dtype in ("i4", "f4e2m1"):
                self.fail("weight {!r} of {} must be in a layout of half bytes", weight.name, weight.dtype)
        else:
            wanted = MATRIX_DTYPES[weight.layout]
            if len(weight.shape) != 2 or weight.dtype not in wanted:
                self.fail(
                    "weight {!r}: layout {} needs a matrix of {}",
                    *(weight.name, weight.layout, " or ".join(wanted)),
                )
        if entry is None:
            self.fail("uses weight {!r}, which rank0.safetensors lacks", weight.name)
        needed = -(-layout_bytes(weight) // ALIGNMENT) * ALIGNMENT
        if entry.dtype != CODES[weight.dtype][0] or entry.nbytes != needed:
            self.fail(
                "weight {!r} needs {} bytes of {}; rank0.safetensors holds {} of {}",
                *(weight.name, needed, CODES[weight.dtype][0], entry.nbytes, entry.dtype),
            )

    def check_place(self, value: Value) -> None:
        if value.base is not None:
            self.check_view(value, self.values.get(value.base))
            return
        if value.name in _FED and self.on_gpu:
            return  # lies in the step's input block
        for dim in value.shape:
            if isinstance(dim, str) and dim not in self.most:
                self.fail("value {!r} has a size {}, which this target has no count of", value.name, dim)
        size = math.prod(self.most[dim] if isinstance(dim, str) else dim for dim in value.shape)
        size *= ITEM_BYTES[value.dtype]
        if value.offset % ALIGNMENT or value.column:
            self.fail("value {!r} is not aligned to {} bytes", value.name, ALIGNMENT)
        if value.offset + size > self.program.arena_bytes:
            self.fail(
                "value {!r} ends at byte {} of an arena of {}",
                value.name,
                value.offset + size,
                self.program.arena_bytes,
            )

    def check_view(self, view: Value, base: Value | None) -> None:
        if base is None or base.base is not None:
            self.fail("view {!r} has no base, or a base that is a view itself", view.name)
        rows, width = view.shape[0], view.shape[-1]
        if len(view.shape) != 2 or len(base.shape) != 2 or rows != base.shape[0] or view.dtype != base.dtype:
            self.fail("view {!r} and its base must be matrices of equal rows and dtype", view.name)
        if isinstance(width, str) or isinstance(base.shape[1], str) or view.column + width > base.shape[1]:
            self.fail("view {!r} reaches past the columns of its base", view.name)

    def check_steps(self, weights: set[str]) -> None:
        ready = set()
        for name, (dtype, shape) in _FED.items():
            fed = self.values.get(name)
            if fed is None:
                continue
            if fed.dtype != dtype or fed.shape != shape or fed.base is not None:
                self.fail("value {!r} must be {} of shape {}", name, dtype, shape)
            ready.add(name)
        for index, step in enumerate(self.program.steps):
            where = f"step {index} ({step.kernel[:40]!r})"
            self.check_step(step, where, ready, weights)
        logits = self.values.get("logits")
        if (
            "logits" not in ready
            or logits is None
            or logits.dtype != "f32"
            or logits.shape != ["N", self.program.vocab_size]
        ):
            self.fail("must end in value 'logits' of float32 [N, {}]", self.program.vocab_size)
        for index, step in enumerate(self.program.sampling):
            where = f"sampling step {index} ({step.kernel[:40]!r})"
            self.check_step(step, where, ready, weights, sampling=True)
        if self.program.sampling:
            self.check_sampled(ready)
        elif self.program.feeding:
            self.fail("feeds what it does not sample")
        for index, step in enumerate(self.program.feeding):
            where = f"feeding step {index} ({step.kernel[:40]!r})"
            self.check_step(step, where, ready, weights, sampling=True)

    def check_sampled(self, ready: set[str]) -> None:
        """The values that the runtime reads after sampling."""
        for name, (dtype, width) in _SAMPLED.items():
            value = self.values.get(name)
            if name not in ready or value is None or value.dtype != dtype or value.shape != ["N", width]:
                self.fail("must sample into value {!r} of {} [N, {}]", name, dtype, width)

    def check_step(
        self, step: Step, where: str, ready: set[str], weights: set[str], *, sampling: bool = False
    ) -> None:
        """Check one step, and add what it writes to ``ready``."""
        if self.on_gpu:
            self.launches.check(step, where, _FED, sampling=sampling)
        elif sampling:
            self.fail("{}: the host samples by itself", where)
        else:
            self.check_host_step(step, where)
        for name in step.inputs:
            value = self.values.get(name)
            if value is None or (value.base or name) not in ready:
                self.fail("{} reads {!r} before anything wrote it", where, name)
        for name in step.weights:
            if name not in weights:
                self.fail("{} reads unknown weight {!r}", where, name)
        for name in step.outputs:
            if name not in self.values or self.values[name].base is not None or name in _FED:
                self.fail("{} writes {!r}, which is unknown, a view or an input", where, name)
            ready.add(name)
        if step.modules:
            self.check_modules(step, where)
        if self.on_gpu and (step.modules or step.adapted or step.adapter is not None):
            self.check_adapted(step, where, ready)

    def check_adapted(self, step: Step, where: str, ready: set[str]) -> None:
        """Modules, their place in a slot and launches come together, and operands exist."""
        slots, place = self.program.adapters, step.adapter
        if slots is None or place is None or not step.modules or not step.adapted:
            self.fail("{} takes adapters, and their modules, launches, place or slots are missing", where)
        width = self.values[step.outputs[0]].shape[-1]
        columns = int(width) * (2 if "gated" in step.kernel else 1)
        ranks = slots.rank * len({one.module for one in step.modules})
        ends = (place.a + 2 * ranks * place.inputs, place.b + 2 * slots.rank * columns)
        if any(at % PART_ALIGNMENT for at in (place.a, place.b)) or max(ends) > slots.slot_bytes:
            self.fail("{} has adapters outside of a slot of {} bytes", where, slots.slot_bytes)
        for name in place.operands:
            value = self.values.get(name)
            if value is None or name in _FED or (value.base is not None and value.base not in ready):
                self.fail("{} uses {!r} for adapters, which is unknown or an input", where, name)
        self.launches.check_adapted(step, where, _FED)

    def check_host_step(self, step: Step, where: str) -> None:
        if step.kernel == NATIVE:
            if [len(launch.args) for launch in step.launches] != [0] or step.launches[0].kernel >= len(
                self.program.kernels
            ):
                self.fail("{} must name one kernel of the engine's own", where)
            return
        kernel = KERNELS.get(step.kernel)
        if kernel is None:
            self.fail("{} names a kernel that this castiron lacks. Rebuild the engine", where)
        if step.launches or step.adapted or step.adapter is not None:
            self.fail("{} has launches, which a kernel of the runtime does without", where)
        for what in ("inputs", "weights", "outputs"):
            low, high = getattr(kernel, what)
            if not low <= len(getattr(step, what)) <= high:
                self.fail("{} has {} {}; expected {} to {}", where, len(getattr(step, what)), what, low, high)
        for name, attr in step.attrs.items():
            if name not in kernel.attrs or not attr_fits(attr, kernel.attrs[name]):
                self.fail("{}: attribute {!r} is unknown or of the wrong kind", where, name)
        layer = step.attrs.get("layer")
        if "layer" in kernel.attrs and not (
            isinstance(layer, int) and 0 <= layer < len(self.program.kv_layers)
        ):
            self.fail("{} names cache layer {!r} of {}", where, layer, len(self.program.kv_layers))

    def check_modules(self, step: Step, where: str) -> None:
        """Columns that modules claim lie in the product, in order and apart, and all products of a module
        have its width of inputs.
        """
        if step.kernel not in PRODUCTS:
            self.fail("{} names modules, which only a product has", where)
        inputs = self.values[step.inputs[0]].shape[-1] if step.adapter is None else step.adapter.inputs
        width = self.values[step.outputs[0]].shape[-1]
        if isinstance(inputs, str) or isinstance(width, str):
            self.fail("{} names modules, and its operands are no matrices", where)
        width *= 2 if "gated" in step.kernel else 1
        end = 0
        for one in step.modules:
            if self.module_inputs.setdefault(one.module, inputs) != inputs:
                self.fail("{} has {} inputs for {!r}, and another step has others", where, inputs, one.module)
            if one.column < end or one.column + one.count > width:
                self.fail(
                    "{} has columns of {!r} that are none of its {}, or twice", where, one.module, width
                )
            end = one.column + one.count

    def fail(self, message: str, *details: object) -> NoReturn:
        shown = [detail[:120] if isinstance(detail, str) else detail for detail in details]
        raise EngineError(f"the program for {self.program.target[:32]!r} {message.format(*shown)}.")
