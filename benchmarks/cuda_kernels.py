"""Compiles the products of known models for every CUDA target and prints what their machine code uses.

    python benchmarks/cuda_kernels.py [--targets sm_90,sm_100] [--models smollm2-135m,llama-8b]

No GPU is needed. One line a kernel: threads, registers, spills, shared memory, matrix instructions and the
share of 16-byte loads. Ends with code 1 if a kernel spills.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/plugins/cuda"))

from castiron.plugins.cuda.linear import TACTICS
from castiron.plugins.targets import TARGETS
from compiling import compiled, gated_op, kernels_of, label, linear_op

LINEAR, GATED = TACTICS
#: hidden size, width of q + k + v, width of the MLP, vocabulary.
MODELS = {
    "smollm2-135m": (576, 960, 1536, 49152),
    "qwen2.5-1.5b": (1536, 2048, 8960, 151936),
    "llama-8b": (4096, 6144, 14336, 128256),
    "llama-70b": (8192, 10240, 28672, 128256),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cuda = [name for name, target in TARGETS.items() if target.family == "cuda"]
    parser.add_argument("--targets", default=",".join(cuda))
    parser.add_argument("--models", default=",".join(MODELS))
    arguments = parser.parse_args()
    spilled = 0
    for name in arguments.models.split(","):
        hidden, qkv, mlp, vocabulary = MODELS[name]
        ops = [
            (LINEAR, linear_op(qkv, hidden)),
            (LINEAR, linear_op(hidden, hidden, residual=True)),
            (GATED, gated_op(mlp, hidden)),
            (LINEAR, linear_op(hidden, mlp, residual=True)),
            (LINEAR, linear_op(vocabulary, hidden, rows="N")),
        ]
        for target in arguments.targets.split(","):
            kernels = [kernel for tactic, op in ops for kernel in kernels_of(tactic, op, TARGETS[target])]
            for kernel, code in compiled([kernel for kernel in kernels if kernel.hot], target):
                used = code.resources
                spilled += used["spills"] > 0
                wide = used["wide_loads"] / max(used["global_loads"], 1)
                print(
                    f"{name:13} {target:10} {label(kernel):58} {code.threads:4} threads "
                    f"{used['registers']:3} regs {used['spills']:3} spills {code.shared_bytes:6} B shared "
                    f"{used['matrix']:>7} {used['matrix_instructions']:3}  {wide:4.0%} wide",
                    flush=True,
                )
    print("no spills" if not spilled else f"{spilled} kernels spill")
    sys.exit(1 if spilled else 0)


if __name__ == "__main__":
    main()
