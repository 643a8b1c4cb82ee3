"""Which bytes a launch may touch: those of its operands, not all of the arena that they lie in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from castiron.engines.cuda_layout import kv_layout
from castiron.engines.program import ITEM_BYTES, Arg, Launch, Program, Value
from castiron.engines.symbols import LORA_TILE, largest_counts
from castiron.engines.weights_file import layout_bytes

_NUMBERS = ("i32", "i64", "f32")


@dataclass(frozen=True)
class Region:
    """``size`` bytes from ``begin``, and again after each ``stride`` (0: once)."""

    begin: int
    size: int
    stride: int = 0

    def holds(self, addresses: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, Any]:
        """For each address, whether ``size`` bytes there are inside."""
        offsets = addresses - np.uint64(self.begin)  # below the beginning: wraps to a huge number
        if self.stride:
            huge = np.uint64(1 << 62)
            offsets = np.where(offsets < huge, offsets % np.uint64(self.stride), huge)
        return np.asarray(offsets + np.uint64(size) <= np.uint64(self.size))


class Operands:
    """Regions of the operands of a program's launches, at the largest counts that the program allows."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._counts = largest_counts(program.limits, program.vocab_size, program.prefill_tile)
        self._values = {value.name: value for value in program.values}
        self._weights = {weight.name: layout_bytes(weight) for weight in program.weights}
        self._layout = kv_layout(program.kv_layers)
        self._adapters = _adapter_sizes(program)
        self._launches: dict[int, list[Launch]] = {}
        for step in [*program.steps, *program.sampling, *program.feeding]:
            for launch in (*step.launches, *step.adapted):
                self._launches.setdefault(launch.kernel, []).append(launch)

    def regions(self, kernel: int, args: Sequence[int | float]) -> list[Region] | None:
        """What a launch of ``kernel`` with these arguments may touch; None for a program of bare kernels.

        A program may hold several launches that look alike; then it is what any of them may touch.
        Raises ValueError when the program has no launch with such arguments.
        """
        if not self._launches:
            return None
        launches = [launch for launch in self._launches.get(kernel, []) if self._fits(launch, args)]
        if not launches:
            raise ValueError(
                f"the program launches {self._program.kernels[kernel].name} with other arguments than "
                f"{list(args)}"
            )
        return [
            region
            for launch in launches
            for arg, address in zip(launch.args, args, strict=True)
            if (region := self._region(arg, int(address))) is not None
        ]

    def _fits(self, launch: Launch, args: Sequence[int | float]) -> bool:
        """Numbers must agree, and values must lie as far apart as planned."""
        bases = set()
        for arg, found in zip(launch.args, args, strict=True):
            for kind in _NUMBERS:
                planned = getattr(arg, kind)
                if planned is not None and np.float32(planned) != np.float32(found):
                    return False
            if arg.value is not None and not _is_input(arg.value):
                bases.add(int(found) - self._offset(self._values[arg.value]))
        return len(bases) <= 1

    def _offset(self, value: Value) -> int:
        if value.base is None:
            return value.offset
        return self._values[value.base].offset + value.column * ITEM_BYTES[value.dtype]

    def _region(self, arg: Arg, address: int) -> Region | None:
        if arg.value is not None:
            value = self._values[arg.value]
            whole = value if value.base is None else self._values[value.base]
            size = ITEM_BYTES[whole.dtype] * prod(
                self._counts[dim] if isinstance(dim, str) else dim for dim in whole.shape
            )
            return Region(address - (self._offset(value) - whole.offset), size)
        if arg.weight is not None:
            return Region(address, self._weights[arg.weight])
        if arg.adapter is not None:
            assert self._program.adapters is not None
            return Region(address, self._adapters[arg.adapter], self._program.adapters.slot_bytes)
        if arg.input is not None:
            return Region(address, 4 * self._input_count(arg.input))
        for layer, offsets, width in (
            (arg.k_cache, self._layout.k_offsets, "head_dim"),
            (arg.v_cache, self._layout.v_offsets, "v_head_dim"),
        ):
            if layer is not None:
                shape = self._program.kv_layers[layer]
                size = 32 * shape.kv_heads * getattr(shape, width) * ITEM_BYTES[shape.dtype]
                stride = self._layout.stride_of(layer)
                assert offsets[layer] + size <= stride
                return Region(address, size, stride)
        return None

    def _input_count(self, name: str) -> int:
        per_row = {"query_start": "S", "kv_len": "S", "decode_seq": "D", "tile_seq": "P", "tile_row": "P"}
        if name in ("block_table", "window_table"):
            return self._counts["S"] * -(-self._program.limits.max_seq_len // 32)
        if name in ("token_ids", "positions", "slots", "window_slots", "token_source"):
            return self._counts["T"]
        if name.startswith("edit_"):
            return self._counts["E"]
        if "lora" in name:
            tiles = self._counts["B" if name.startswith("logit") else "A"]
            return tiles * (LORA_TILE if name.endswith("rows") else 1)
        return self._counts[per_row.get(name, "N")] + (name == "query_start")


def _adapter_sizes(program: Program) -> dict[int, int]:
    """Bytes of each product's a and b, by where they begin in a slot."""
    widths = {value.name: value.shape[-1] for value in program.values}
    sizes: dict[int, int] = {}
    for step in program.steps:
        if step.adapter is not None and program.adapters is not None:
            rank, modules = program.adapters.rank, {one.module for one in step.modules}
            columns = int(widths[step.outputs[0]]) * (2 if "gated" in step.kernel else 1)
            sizes[step.adapter.a] = 2 * rank * len(modules) * step.adapter.inputs
            sizes[step.adapter.b] = 2 * rank * columns
    return sizes


def _is_input(name: str) -> bool:
    """Values that lie in the step's input block, not in the arena."""
    return name in ("token_ids", "positions", "logit_rows")
