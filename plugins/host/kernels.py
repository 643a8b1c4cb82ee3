"""Calls of host kernels, with what lowering must know of each: who takes views, who works in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..tactic import Attr, Call, WeightUse

#: Kernels marked ◇ in docs/program.md: inputs may be column views of wider values.
_TAKES_VIEWS = frozenset(
    (
        *(
            "linear",
            "gated_linear",
            "quantized_linear",
            "quantized_gated_linear",
            "round",
            "rms_norm",
            "layer_norm",
            "gather_rows",
            "copy",
        ),
        *("rope", "rope_write_kv", "write_kv", "paged_attention"),
    )
)

#: Kernels marked ↺: pairs (output, input) that may share bytes when shapes agree and the input dies there.
#: A pair of an add-norm is fixed (y over x, sum over residual): each row is read whole before it is written.
_IN_PLACE: Mapping[str, tuple[tuple[int, int], ...]] = {
    "linear": ((0, 1),),
    "quantized_linear": ((0, 1),),
    "add_rms_norm": ((0, 0), (1, 1)),
    "add_layer_norm": ((0, 0), (1, 1)),
    "rope": ((0, 0),),
    "unary": ((0, 0),),
    "binary": ((0, 0), (0, 1)),
    "clip": ((0, 0),),
}


def host_call(
    kernel: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    weights: Sequence[WeightUse] = (),
    attrs: Mapping[str, Attr] | None = None,
) -> Call:
    """A call of one of the kernels of docs/program.md."""
    return Call(
        kernel,
        inputs,
        outputs,
        weights,
        attrs or {},
        takes_views=kernel in _TAKES_VIEWS,
        in_place=_IN_PLACE.get(kernel, ()),
    )
