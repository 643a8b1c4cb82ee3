"""The memory plan: arena offsets by liveness, and the table of everything the engine reserves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..engines.cuda_layout import step_input_bytes
from ..engines.kernels import PRODUCTS
from ..engines.kv_cache import full_pool, kv_blocks
from ..engines.program import BLOCK_TOKENS, Program, Step
from ..engines.weights_file import layout_bytes

ALIGNMENT = 64


@dataclass(frozen=True)
class Buffer:
    """A run of arena bytes that is live from step ``first`` to step ``last``, ends included."""

    size: int
    first: int
    last: int


def aligned(size: int) -> int:
    """``size`` rounded up to the arena's alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def plan_arena(buffers: Sequence[Buffer]) -> tuple[list[int], int]:
    """Offsets for buffers, and the arena's size, so that no two buffers live at once overlap.

    Largest first, each into the smallest gap that holds it (best fit): within a few percent of the
    largest sum of live sizes for transformer graphs, and deterministic.
    """
    order = sorted(range(len(buffers)), key=lambda i: (-buffers[i].size, buffers[i].first, i))
    offsets = [0] * len(buffers)
    placed: list[int] = []
    total = 0
    for index in order:
        buffer = buffers[index]
        size = aligned(buffer.size)
        taken = sorted(
            (offsets[i], offsets[i] + aligned(buffers[i].size))
            for i in placed
            if buffers[i].first <= buffer.last and buffer.first <= buffers[i].last
        )
        best, best_gap, end = None, None, 0
        for start, stop in taken:
            gap = start - end
            if gap >= size and (best_gap is None or gap < best_gap):
                best, best_gap = end, gap
            end = max(end, stop)
        offsets[index] = end if best is None else best
        placed.append(index)
        total = max(total, offsets[index] + size)
    return offsets, total


def peak_live_bytes(buffers: Sequence[Buffer]) -> int:
    """The largest sum of sizes live at one step: no plan can be smaller."""
    steps = {buffer.first for buffer in buffers}
    return max(
        (sum(aligned(b.size) for b in buffers if b.first <= step <= b.last) for step in steps),
        default=0,
    )


@dataclass(frozen=True)
class MemoryItem:
    """One line of the plan: what, how many bytes, and how it comes about."""

    item: str
    bytes: int
    note: str = ""


@dataclass(frozen=True)
class MemoryPlan:
    """What a target reserves when the engine starts; the KV cache is given per block and for a full batch."""

    items: tuple[MemoryItem, ...]


def memory_plan(program: Program) -> MemoryPlan:
    """The table for one program."""
    limits, weights = program.limits, program.weights
    matrices = sum(layout_bytes(w) for w in weights if len(w.shape) > 1)
    vectors = sum(layout_bytes(w) for w in weights) - matrices
    on_gpu = program.prefill_tile > 0
    sizes = kv_blocks(program)
    blocks, windows = full_pool(program)
    block = sizes.block_bytes if windows else sizes.together
    items = [
        MemoryItem(
            "weights: matrices and tables", matrices, f"{sum(len(w.shape) > 1 for w in weights)} tensors"
        ),
        MemoryItem(
            "weights: vectors", vectors, f"{sum(len(w.shape) == 1 for w in weights)} tensors, float32"
        ),
        MemoryItem(
            "activations",
            program.arena_bytes,
            f"{limits.max_num_tokens} tokens a step; {limits.max_logit_rows} rows of logits included",
        ),
        *_rounded_rows(program),
        MemoryItem(
            "KV cache, one block",
            block,
            f"{BLOCK_TOKENS} tokens, "
            + ("layers that see everything" if windows else f"{len(program.kv_layers)} layers"),
        ),
    ]
    if windows:
        note = f"{BLOCK_TOKENS} tokens, layers with a window of {sizes.window} tokens"
        items.append(MemoryItem("KV cache, one window block", sizes.window_block_bytes, note))
    items.append(
        MemoryItem(
            "KV cache, all requests at full length",
            block * blocks + sizes.window_block_bytes * windows,
            f"{blocks} blocks = {limits.max_batch_size} requests x {limits.max_seq_len} tokens"
            + (f", {windows} window blocks" if windows else "")
            + "; the runtime may reserve fewer",
        )
    )
    if program.adapters is not None:
        note = (
            f"rank {program.adapters.rank}; --max-loras of them where the runtime takes adapters, else none"
        )
        items.append(MemoryItem("LoRA adapters, one slot", program.adapters.slot_bytes, note))
    if on_gpu:
        items.append(
            MemoryItem(
                "step inputs",
                step_input_bytes(program),
                "token ids, positions, block tables: one upload a step; CUDA graphs come on top, measured "
                "when the runtime captures them",
            )
        )
    return MemoryPlan(tuple(items))


def _rounded_rows(program: Program) -> list[MemoryItem]:
    """On host, products round their rows, or put them in the order of experts, into memory beside the arena;
    all share the largest (CUDA programs have values for it).
    """
    if program.target != "host":
        return []
    largest = max((rounded_bytes(program, step) for step in program.steps), default=0)
    note = (
        "of the largest product that rounds or sorts its rows; of bf16 weights where the CPU multiplies bf16"
    )
    return [MemoryItem("rounded rows of activations", largest, note)] if largest else []


def rounded_bytes(program: Program, step: Step) -> int:
    """Memory for the rows that a step of a host program prepares before its product, in bytes at most.

    A row of codes has two floats for each run of inputs under one scale, and a starting sum for each chunk of
    at least 32; a row in another format has its numbers as floats; before bf16 weights a CPU that multiplies
    bf16 rounds rows to it (cpp/device/host/kernels/table.h). Experts have a row for each pair of a token and
    an expert, which is copied where it is not rounded, and the order of the pairs beside.
    """
    if "experts" in step.attrs:
        return _expert_bytes(program, step)
    if step.kernel not in PRODUCTS:
        return 0
    coded = step.kernel.startswith("quantized")
    x_format = step.attrs.get("x_format", "float" if coded else "auto")
    if x_format == "float" and not step.attrs.get("has_columns"):
        return 0
    if not coded and not _is_bf16(program, step.weights[0]):
        return 0
    shape = next(value.shape for value in program.values if value.name == step.inputs[0])
    limits, width = program.limits, int(shape[-1])
    rows = limits.max_logit_rows if shape[0] == "N" else limits.max_num_tokens
    if not coded:
        return rows * _bf16_row(width)
    if x_format != "int8":
        return rows * aligned(4 * width)
    return rows * _coded_row(step, width)


def _expert_bytes(program: Program, step: Step) -> int:
    shapes = {value.name: value.shape for value in program.values}
    width, picks = int(shapes[step.inputs[0]][-1]), int(shapes[step.outputs[0]][1])
    pairs = program.limits.max_num_tokens * picks
    row = max(aligned(4 * width), _bf16_row(width))
    if step.attrs.get("x_format") == "int8":
        row = max(row, _coded_row(step, width))
    experts = int(step.attrs["experts"])  # type: ignore[arg-type]
    return pairs * row + aligned(4 * (experts + 1 + pairs))


def _bf16_row(width: int) -> int:
    return (-(-width // 32) | 1) * ALIGNMENT  # an odd number of lines


def _coded_row(step: Step, width: int) -> int:
    run = min(int(step.attrs.get(name) or width) for name in ("x_group", "group"))  # type: ignore[arg-type]
    runs, chunks = -(-width // run), -(-run // 32)
    return aligned(aligned(width) + runs * (8 + 4 * chunks))


def _is_bf16(program: Program, name: str) -> bool:
    return next(weight.dtype for weight in program.weights if weight.name == name) == "bf16"
