"""Every generic kernel compiles, with sizes and strides as tuples, and whole rows move 16 bytes at a time."""

from __future__ import annotations

from castiron.plugins import Op, Operand
from castiron.plugins.cuda import TACTICS
from castiron.plugins.targets import TARGETS
from compiling import compiled, kernels_of

BY_KIND = {tactic.kind: tactic for tactic in TACTICS}
X = Operand("x", ("T", 4, 64))
ROWS = Operand("x", ("T", 256), "bf16")
OPS = [
    Op("castiron.Activation", (X,), (Operand("y", X.shape, "bf16"),), {"fn": "gelu_erf"}),
    Op("Add", (X, Operand("b", (4, 1))), (Operand("y", X.shape),)),
    Op("Pow", (X, X), (Operand("y", X.shape),)),
    Op("Transpose", (X,), (Operand("y", (4, "T", 64)),), {"perm": [1, 0, 2]}),
    Op("castiron.Copy", (ROWS,), (Operand("y", ("T", 4, 64)),)),
    Op("Softmax", (X,), (Operand("y", X.shape),)),
    Op("MatMul", (X, Operand("b", ("T", 64, 8))), (Operand("y", ("T", 4, 8)),)),
    Op("castiron.LayerNorm", (ROWS,), (Operand("y", ROWS.shape, "bf16"),), {"eps": 1e-5}),
    Op(
        "castiron.AddRMSNorm",
        (ROWS, ROWS),
        (Operand("y", ROWS.shape), Operand("s", ROWS.shape)),
        {"eps": 1e-5},
    ),
    Op("castiron.GatherRows", (ROWS, Operand("rows", ("N",), "i32")), (Operand("y", ("N", 256)),)),
]


def test_generic_kernels_compile_without_spills() -> None:
    kernels = [kernel for op in OPS for kernel in kernels_of(BY_KIND[op.kind], op, TARGETS["sm_80"])]
    results = compiled(kernels, "sm_80")
    assert len(results) == len(OPS)
    for kernel, code in results:
        assert code.resources["spills"] == 0, kernel.function.__name__
        if kernel.function.__name__ in ("norm", "unary"):
            assert code.resources["wide_loads"] > 0, kernel.function.__name__
