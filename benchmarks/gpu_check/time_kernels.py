"""Each op of an engine's steps on the GPU: time, and share of the measured roofs.

  time_kernels.py ENGINE --peaks FILE

All layers' launches of an op are captured into one CUDA graph, so that weights come from memory and not from
the cache, and launching costs nothing; times are medians by CUDA events, divided by the number of layers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from castiron.engines import open_engine
from castiron.engines.program import Step
from gpu_driver import Driver, Loaded
from peaks import median_seconds
from program_on_gpu import ProgramOnGpu
from rows import Row

_WEIGHT_BYTES = {"f32": 4, "bf16": 2, "f16": 2}
#: Sequences of (rows, tokens before): decoding behind a thousand tokens, and prompts.
STEPS: tuple[tuple[str, list[tuple[int, int]]], ...] = (
    ("decode batch 1", [(1, 1000)]),
    ("decode batch 64", [(1, 1000)] * 64),
    ("decode batch 256", [(1, 1000)] * 256),
    ("prefill 1k", [(1024, 0)]),
    ("prefill 8k", [(8192, 0)]),
)


@dataclass(frozen=True)
class Work:
    """What a step of the program must at least do: bytes to and from memory, operations of matrix units."""

    bytes: float
    flops: float


def work_of(step: Step, gpu: ProgramOnGpu, sequences: Sequence[tuple[int, int]]) -> Work:
    """Activations in and out, weights and cache once; products and attention."""
    weights = {weight.name: weight for weight in gpu.program.weights}
    moved = float(sum(gpu.bytes_of(name) for name in dict.fromkeys((*step.inputs, *step.outputs))))
    flops = 0.0
    if step.kernel in ("paged_attention", "rope_write_kv", "write_kv"):
        layer = gpu.program.kv_layers[int(step.attrs["layer"])]  # type: ignore[arg-type]
        row = layer.kv_heads * (layer.head_dim + layer.v_head_dim) * _WEIGHT_BYTES[layer.dtype]
        reads = step.kernel == "paged_attention"
        moved += row * sum(rows + before if reads else rows for rows, before in sequences)
        if reads:
            # The temporaries of split attention are no work that must be done.
            moved -= sum(gpu.bytes_of(name) for name in step.outputs[1:])
            seen = sum(rows * before + rows * (rows + 1) / 2 for rows, before in sequences)
            flops = 2.0 * seen * int(step.attrs["q_heads"]) * (layer.head_dim + layer.v_head_dim)  # type: ignore[arg-type]
        return Work(moved, flops)
    if step.kernel == "sample":
        return Work(float(gpu.bytes_of(step.inputs[0])), 0.0)
    for name in step.weights:
        weight = weights[name]
        size = _WEIGHT_BYTES[weight.dtype]
        if step.kernel == "embedding":
            moved += gpu.rows_of(step.outputs[0]) * weight.shape[-1] * size
            continue
        count = 1
        for dim in weight.shape:
            count *= dim
        moved += count * size
        if step.kernel in ("linear", "gated_linear") and len(weight.shape) == 2:
            flops += 2.0 * gpu.rows_of(step.inputs[0]) * count
    return Work(moved, flops)


def groups_of(steps: Sequence[Step], gpu: ProgramOnGpu) -> dict[tuple[Any, ...], list[Step]]:
    """Steps that launch the same kernels on operands of the same shapes."""
    shapes = {weight.name: tuple(weight.shape) for weight in gpu.program.weights}
    groups: dict[tuple[Any, ...], list[Step]] = {}
    for step in steps:
        kernels = tuple(launch.kernel for launch in step.launches)
        operands = tuple(tuple(gpu.values[name].shape) for name in step.inputs)
        key = (step.kernel, kernels, operands, tuple(shapes[name] for name in step.weights))
        groups.setdefault(key, []).append(step)
    return groups


def time_group(steps: Sequence[Step], gpu: ProgramOnGpu) -> tuple[float, list[str]]:
    """Seconds of one step of a group, and its kernels."""
    launches = [launch for step in steps for launch in gpu.launches(step)]
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.current_stream().cuda_stream
    for launch in launches:
        launch(stream)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream().cuda_stream
        for launch in launches:
            launch(stream)
    names = list(dict.fromkeys(launch.code.function for launch in launches))
    return median_seconds(graph.replay) / len(steps), names


def label(step: Step, gpu: ProgramOnGpu, names: Sequence[str]) -> str:
    """The op, the shapes of its matrices and its kernels."""
    shapes = {weight.name: weight.shape for weight in gpu.program.weights}
    sizes = ["x".join(map(str, shapes[name])) for name in step.weights if len(shapes[name]) == 2]
    detail = " ".join(sizes) if step.kernel in ("linear", "gated_linear") else ""
    return f"{step.kernel} {detail} ({', '.join(names)})".replace("  ", " ")


def time_steps(gpu: ProgramOnGpu, peaks: dict[str, float]) -> None:
    """Emit a row for each kind of op of each of STEPS, the longest first."""
    program = gpu.program
    for name, sequences in STEPS:
        if sum(rows for rows, _ in sequences) > program.limits.max_num_tokens:
            continue
        if len(sequences) > program.limits.max_batch_size:
            continue
        gpu.set_step(sequences)
        rows, total = [], 0.0
        for steps in groups_of([*program.steps, *program.sampling], gpu).values():
            if not gpu.launches(steps[0]):
                continue
            seconds, kernels = time_group(steps, gpu)
            work = work_of(steps[0], gpu, sequences)
            memory, matrix = work.bytes / peaks["bandwidth"], work.flops / peaks["matrix"]
            roof = "matrix peak" if matrix > memory else "copy bandwidth"
            total += seconds * len(steps)
            note = f"{len(steps)} in a step, {1e3 * seconds * len(steps):.3f} ms of it"
            title = label(steps[0], gpu, kernels)
            share = max(memory, matrix) / seconds
            section = f"ops of the 8B engine: {name}"
            rows.append(
                (seconds * len(steps), Row(section, title, None, 1e6 * seconds, "us", roof, share, note))
            )
        for _, row in sorted(rows, key=lambda pair: -pair[0]):
            row.emit()
        Row(f"ops of the 8B engine: {name}", "all together", value=1e3 * total, unit="ms").emit()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", type=Path)
    parser.add_argument("--peaks", type=Path, required=True)
    options = parser.parse_args()
    engine = open_engine(options.engine)
    (target,) = engine.targets
    most = max(sum(rows + before for rows, before in sequences) for _, sequences in STEPS)
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    torch.zeros(1, device="cuda")  # makes torch's context current, which the driver's calls then use
    driver = Driver()
    gpu = ProgramOnGpu(engine, target, most + 32 * 256, partial(Loaded, driver), "cuda", multiprocessors)
    time_steps(gpu, json.loads(options.peaks.read_text()))


if __name__ == "__main__":
    main()
