"""What lowering must know of the host kernels besides their operands: who takes views, who works in place."""

from __future__ import annotations

from collections.abc import Mapping

#: Kernels marked ◇ in docs/program.md: inputs may be column views of wider values.
TAKES_VIEWS = frozenset(
    (
        *("linear", "gated_linear", "rms_norm", "layer_norm", "gather_rows", "copy"),
        *("rope", "rope_write_kv", "write_kv", "paged_attention"),
    )
)

#: Kernels marked ↺: pairs (output, input) that may share bytes when shapes agree and the input dies there.
#: A pair of an add-norm is fixed (y over x, sum over residual): each row is read whole before it is written.
IN_PLACE: Mapping[str, tuple[tuple[int, int], ...]] = {
    "linear": ((0, 1),),
    "add_rms_norm": ((0, 0), (1, 1)),
    "add_layer_norm": ((0, 0), (1, 1)),
    "rope": ((0, 0),),
    "unary": ((0, 0),),
    "binary": ((0, 0), (0, 1)),
    "clip": ((0, 0),),
}
