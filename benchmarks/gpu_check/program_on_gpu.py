"""A CUDA program's buffers and launches by torch and the driver: a second reading of docs/cuda-program.md.

It exists to time single ops outside of the runtime; it computes what the runtime's device would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from castiron.engines import Engine
from castiron.engines.cuda_layout import kv_layout
from castiron.engines.program import Arg, GridDim, Program, Step, Value
from castiron.engines.symbols import largest_counts
from castiron.engines.weights_file import layout_bytes
from gpu_driver import SCRATCH_ALIGNMENT, Kernel, KernelCode, Launch

_BLOCK_TOKENS = 32
_ITEM_BYTES = {"f32": 4, "i32": 4, "bf16": 2, "f16": 2}
_TORCH = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
#: Step inputs of sampling: float32, and their values for a greedy row without penalties.
_GREEDY = {
    "temperature": 0.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "uniform": 0.5,
    "repetition": 1.0,
    "frequency": 0.0,
    "presence": 0.0,
}


class ProgramOnGpu:
    """Memory for a program with random weights, and the inputs of one step at a time.

    Args:
        engine: an open engine; its weights' file is not read.
        target: one of its CUDA targets.
        kv_tokens: room in the cache, over all sequences.
        load: makes a kernel's code launchable; ``gpu_driver.Loaded`` on a GPU.
        device: torch's name of it. multiprocessors: how many it has.
    """

    def __init__(
        self,
        engine: Engine,
        target: str,
        kv_tokens: int,
        load: Callable[[KernelCode], Kernel],
        device: str,
        multiprocessors: int,
    ) -> None:
        self.program: Program = engine.program(target)
        self._images = engine.kernel_images(target)
        self._make, self._device, self._multiprocessors = load, device, multiprocessors
        self._arena = _bytes(self.program.arena_bytes, device)
        self.weights = {
            weight.name: _random(weight.dtype, layout_bytes(weight), device)
            for weight in self.program.weights
        }
        self._layout = kv_layout(self.program.kv_layers)
        self._blocks = kv_tokens // _BLOCK_TOKENS
        # Zeros: every number in the cache is finite, and its size is all that times depend on.
        # One pool of the layers without a window and one of those with: blocks have the same numbers in both.
        self._pools = [
            torch.zeros(self._blocks * stride, dtype=torch.uint8, device=device)
            for stride in (self._layout.block_stride, self._layout.window_stride)
        ]
        self.values = {value.name: value for value in self.program.values}
        self._loaded: dict[int, Kernel] = {}
        # All that were made: launches that are bound already keep the address of theirs.
        self._scratch = [_bytes(SCRATCH_ALIGNMENT, device)]
        self.counts: dict[str, int] = {}
        self._inputs: dict[str, torch.Tensor] = {}

    def set_step(self, sequences: Sequence[tuple[int, int]]) -> None:
        """The step's inputs: of each sequence, its rows and the tokens before them. One row of logits each.

        Raises ValueError where the cache is too small.
        """
        program = self.program
        table_width = -(-program.limits.max_seq_len // _BLOCK_TOKENS)
        tile = program.prefill_tile
        starts, free = [0], 0
        lengths: list[int] = []
        slots: list[int] = []
        positions: list[int] = []
        table: list[list[int]] = []
        decodes: list[int] = []
        tiles: list[int] = []
        tile_rows: list[int] = []
        for index, (rows, before) in enumerate(sequences):
            length = rows + before
            count = -(-length // _BLOCK_TOKENS)
            blocks = list(range(free, free + count))
            free += count
            table.append(blocks + [0] * (table_width - count))
            starts.append(starts[-1] + rows)
            lengths.append(length)
            positions += range(before, length)
            slots += [
                blocks[p // _BLOCK_TOKENS] * _BLOCK_TOKENS + p % _BLOCK_TOKENS for p in range(before, length)
            ]
            if rows == 1:
                decodes.append(index)
            else:
                tiles += [index] * -(-rows // tile)
                tile_rows += range(0, rows, tile)
        if free > self._blocks:
            raise ValueError(f"the step needs {free} blocks of the cache; there are {self._blocks}")
        tokens, rows = len(slots), len(sequences)
        self.counts = dict.fromkeys(largest_counts(program.limits, program.vocab_size, tile), 0)
        self.counts |= {"T": tokens, "N": rows, "S": rows, "D": len(decodes), "P": len(tiles)}
        self.counts["V"] = program.vocab_size
        arrays: dict[str, Any] = {
            "token_ids": [7 * i % program.vocab_size for i in range(tokens)],
            "positions": positions,
            "logit_rows": [start - 1 for start in starts[1:]],
            "slots": slots,
            "query_start": starts,
            "kv_len": lengths,
            "block_table": table,
            "window_slots": slots,
            "window_table": table,
            "decode_seq": decodes,
            "tile_seq": tiles,
            "tile_row": tile_rows,
            "token_source": [-1] * tokens,
            "top_k": [0] * rows,
            "num_logprobs": [-1] * rows,
            "edit_row": [-1],
            "edit_token": [-1],
            "edit_count": [-1],
        }
        self._inputs = {
            name: torch.tensor(array or [-1], dtype=torch.int32).to(self._device)
            for name, array in arrays.items()
        }
        for name, number in _GREEDY.items():
            self._inputs[name] = torch.full((rows,), number, device=self._device)

    def launches(self, step: Step) -> list[Launch]:
        """The launches of a step of the program that happen with the present inputs."""
        found = []
        for launch in step.launches:
            when = launch.when
            if when is not None and not when.low <= self.counts[when.of] <= when.high:
                continue
            grid = [self._blocks_of(dim) for dim in launch.grid]
            if 0 in grid:
                continue
            loaded = self._load(launch.kernel)
            needed = prod(grid) * loaded.code.scratch_bytes
            if needed > self._scratch[-1].numel():
                self._scratch.append(_bytes(needed, self._device))
            numbers = [self._number(arg) for arg in launch.args]
            found.append(loaded.bind(grid, numbers, self._scratch[-1].data_ptr()))
        return found

    def rows_of(self, name: str) -> int:
        """Rows that a value has in the present step."""
        first = self.values[name].shape[0]
        return self.counts[first] if isinstance(first, str) else first

    def bytes_of(self, name: str) -> int:
        """Bytes that a value has in the present step."""
        value = self.values[name]
        sizes = [self.counts[dim] if isinstance(dim, str) else dim for dim in value.shape]
        return prod(sizes) * _ITEM_BYTES[value.dtype]

    def read(self, name: str) -> torch.Tensor:
        """A value of the present step."""
        value = self.values[name]
        sizes = [self.counts[dim] if isinstance(dim, str) else dim for dim in value.shape]
        if name in self._inputs:
            return self._inputs[name]
        part = self._arena[value.offset : value.offset + self.bytes_of(name)]
        return part.view(_TORCH[value.dtype]).reshape(sizes)

    def _blocks_of(self, dim: GridDim) -> int:
        blocks = dim.times * (1 if dim.of is None else -(-self.counts[dim.of] // dim.per))
        return min(blocks, dim.per_sm * self._multiprocessors) if dim.per_sm else blocks

    def _load(self, index: int) -> Kernel:
        if index not in self._loaded:
            kernel = self.program.kernels[index]
            code = KernelCode(
                name=kernel.name,
                function=kernel.function,
                image=self._images[kernel.image],
                threads=kernel.threads,
                shared_bytes=kernel.shared_bytes,
                params=kernel.params,
                hidden_pointers=kernel.hidden_pointers,
                scratch_bytes=kernel.scratch_bytes,
            )
            self._loaded[index] = self._make(code)
        return self._loaded[index]

    def _number(self, arg: Arg) -> int | float:
        if arg.value is not None:
            return self._address(self.values[arg.value])
        if arg.weight is not None:
            return self.weights[arg.weight].data_ptr()
        if arg.input is not None:
            return self._inputs[arg.input].data_ptr()
        if arg.size is not None:
            return self.counts[arg.size]
        if arg.k_cache is not None:
            return self._pool_of(arg.k_cache) + self._layout.k_offsets[arg.k_cache]
        if arg.v_cache is not None:
            return self._pool_of(arg.v_cache) + self._layout.v_offsets[arg.v_cache]
        constants = [number for number in (arg.i32, arg.i64, arg.f32) if number is not None]
        return constants[0]

    def _pool_of(self, layer: int) -> int:
        return self._pools[self._layout.layers[layer].window > 0].data_ptr()

    def _address(self, value: Value) -> int:
        if value.base is not None:
            column = value.column * _ITEM_BYTES[value.dtype]
            return self._address(self.values[value.base]) + column
        if value.name in self._inputs:
            return self._inputs[value.name].data_ptr()
        return self._arena.data_ptr() + value.offset


def _bytes(count: int, device: str) -> torch.Tensor:
    return torch.zeros(max(count, SCRATCH_ALIGNMENT), dtype=torch.uint8, device=device)


def _random(dtype: str, nbytes: int, device: str) -> torch.Tensor:
    count = nbytes // _ITEM_BYTES[dtype]
    if dtype == "f32":
        return torch.ones(count, device=device)
    numbers = torch.empty(count, dtype=_TORCH[dtype], device=device)
    return numbers.normal_(std=0.02)
