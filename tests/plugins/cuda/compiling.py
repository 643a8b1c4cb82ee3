"""Compiles the kernels of tactics ahead of time, as a build does, and tells what their machine code uses."""

from __future__ import annotations

from collections.abc import Iterable

from castiron.build.kernels import sass
from castiron.build.kernels.job import Compiled, TritonJob
from castiron.build.kernels.pool import compile_all
from castiron.engines.program import Limits
from castiron.plugins import Call, Context, Op, Operand, Tactic
from castiron.plugins.launch import TritonKernel
from castiron.plugins.targets import TARGETS, Target

LIMITS = Limits(max_batch_size=256, max_num_tokens=8192, max_logit_rows=256, max_seq_len=8192)


def linear_op(n: int, k: int, residual: bool = False, rows: str = "T", y: str = "f32") -> Op:
    """A projection, with the residual stream added where it goes back to it."""
    inputs = [Operand("x", (rows, k), "bf16"), Operand("w", (n, k), constant=True)]
    if residual:
        return Op(
            "castiron.Linear", (*inputs, None, Operand("r", (rows, n))), (Operand("y", (rows, n), "f32"),)
        )
    return Op("castiron.Linear", tuple(inputs), (Operand("y", (rows, n), y),))  # type: ignore[arg-type]


def gated_op(n: int, k: int) -> Op:
    """A SwiGLU: gate and up with their product."""
    weights = (Operand("g", (n, k), constant=True), Operand("u", (n, k), constant=True))
    return Op(
        "castiron.GatedLinear",
        (Operand("x", ("T", k), "bf16"), *weights),
        (Operand("y", ("T", n), "bf16"),),
        {"activation": "silu"},
    )


def kernels_of(tactic: Tactic, op: Op, target: Target) -> list[TritonKernel]:
    """The kernels that the op's launches need on the target."""
    context = Context(target, "bf16", LIMITS)
    found = []
    for action in tactic.lower(op, context).actions:
        if isinstance(action, Call):
            found += [launch.kernel for launch in action.launches]
    assert all(isinstance(kernel, TritonKernel) for kernel in found)
    return [kernel for kernel in found if isinstance(kernel, TritonKernel)]


def job(kernel: TritonKernel, target: Target) -> TritonJob:
    """What the compiler is asked for; every address and stride is a multiple of 16, as whole values' are."""
    aligned = [
        name
        for name, kind in kernel.types.items()
        if kind.startswith("*") or "stride" in name or name in kernel.aligned
    ]
    return TritonJob(
        module=kernel.function.__module__,
        file="",
        function=kernel.function.fn.__qualname__,
        types=tuple(kernel.types.items()),
        constants=tuple(kernel.constants.items()),
        aligned=tuple(aligned),
        num_warps=kernel.num_warps,
        num_stages=kernel.num_stages,
        compute_capability=target.compute_capability,
    )


def compiled(kernels: Iterable[TritonKernel], target_name: str) -> list[tuple[TritonKernel, Compiled]]:
    """The kernels with their machine code, those that are equal once."""
    target = TARGETS[target_name]
    jobs = {repr(job(kernel, target)): (kernel, job(kernel, target)) for kernel in kernels}
    wanted = list(jobs.values())
    results: dict[int, Compiled] = {}
    compile_all([(one, label(kernel)) for kernel, one in wanted], results.__setitem__)
    images = [(results[index].cubin, results[index].function) for index in range(len(wanted))]
    for index, mix in enumerate(sass.instruction_mixes(images, target.compute_capability)):
        results[index].resources.update(mix)
    return [(kernel, results[index]) for index, (kernel, _) in enumerate(wanted)]


def label(kernel: TritonKernel) -> str:
    """Function, shape and tile."""
    constants = kernel.constants
    tile = "x".join(str(constants[name]) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K") if name in constants)
    shape = f"N={constants.get('N')} K={constants.get('K')}"
    gated = " gated" if constants.get("GATED") else ""
    return f"{kernel.function.__name__} {shape}{gated} {tile} splits={constants.get('SPLITS', 1)}"
