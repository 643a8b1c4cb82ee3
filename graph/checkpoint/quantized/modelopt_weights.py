"""How ModelOpt lays the codes of a weight out: one function for each algorithm it exports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from castiron.errors import CheckpointError

from ...weights.quantized import group_count
from .expression import Value, arithmetic, dequantize, reshape, stored, unpack
from .fp8 import E4M3, in_blocks, one_scale
from .module import FLOATS, Module
from .tensor import NOT_ROUNDED, Rounding

_E8M0: Final = ("uint8", "float8_e8m0fnu")


@dataclass(frozen=True)
class Made:
    """A weight, what its codes are, what x is rounded to; ``group``: inputs a scale, 0: none or the row."""

    weight: Value
    kind: str
    rounding: Rounding = NOT_ROUNDED
    group: int = 0


def _fp8(module: Module) -> Made:
    codes = stored(module.take("weight", E4M3, (None, None)))
    weight = dequantize(codes, one_scale(module, "weight_scale", codes.shape[0]), None, "fp8", 0)
    return Made(weight, "fp8", Rounding("fp8", 0, module.scalar("input_scale")))


def _fp8_rows(module: Module) -> Made:
    codes = stored(module.take("weight", E4M3, (None, None)))
    return Made(dequantize(codes, _row_scale(module, codes.shape[0]), None, "fp8", 0), "fp8", Rounding("fp8"))


def _fp8_blocks(module: Module) -> Made:
    codes = stored(module.take("weight", E4M3, (None, None)))
    return Made(in_blocks(module, "weight_scale", codes, (128, 128)), "fp8", group=128)


def _int8(module: Module) -> Made:
    codes = stored(module.take("weight", ("int8",), (None, None)))
    return Made(dequantize(codes, _row_scale(module, codes.shape[0]), None, "int8", 0), "int8")


def _int8_smoothed(module: Module) -> Made:
    return Made(_int8(module).weight, "int8", Rounding("int8", 0, module.scalar("input_scale")))


def _int4(module: Module) -> Made:
    packed = module.take("weight", ("uint8",), (None, None))
    codes = unpack(stored(packed), "int4_row_pairs")
    rows, inputs = codes.shape
    scale = module.take("weight_scale", FLOATS, (rows, None))
    groups = scale.shape[1]
    if groups == 0 or inputs % groups:
        raise CheckpointError(
            f"tensor {scale.name!r} has {groups} scales for {inputs} inputs; expected groups of equal size."
        )
    group = inputs // groups
    return Made(
        dequantize(codes, stored(scale), None, "int4", 0 if groups == 1 else group), "int4", group=group
    )


def _int4_on_fp8(module: Module) -> Made:
    made = _int4(module)
    # The second scale is of the product's fp8 step; the weight is codes times the first alone.
    module.scalar("weight_scale_2")
    return Made(made.weight, "int4", Rounding("fp8", 0, module.scalar("input_scale")), made.group)


def _nvfp4_weight(module: Module) -> Made:
    codes = unpack(stored(module.take("weight", ("uint8",), (None, None))), "fp4_pairs")
    rows, inputs = codes.shape
    scale = module.take("weight_scale", E4M3, (rows, group_count(inputs, 16)))
    module.scalar("weight_scale_2")
    over = reshape(stored(module.peek("weight_scale_2")), (1, 1))
    by_group = arithmetic("Mul", unpack(stored(scale), "e4m3"), over)
    return Made(dequantize(codes, by_group, None, "fp4", 16), "fp4", group=16)


def _nvfp4(module: Module) -> Made:
    made = _nvfp4_weight(module)
    return Made(made.weight, "fp4", Rounding("nvfp4", 0, module.scalar("input_scale")), 16)


def _nvfp4_on_fp8(module: Module) -> Made:
    made = _nvfp4_weight(module)
    return Made(made.weight, "fp4", Rounding("fp8", 0, module.scalar("input_scale")), 16)


def _mxfp4(module: Module) -> Made:
    codes = unpack(stored(module.take("weight", ("uint8",), (None, None))), "fp4_pairs")
    return Made(dequantize(codes, _powers(module, codes), None, "fp4", 32), "fp4", group=32)


def _mxfp4_on_fp8(module: Module) -> Made:
    made = _mxfp4(module)
    return Made(made.weight, "fp4", Rounding("fp8", 0, module.scalar("input_scale")), 32)


def _mxfp8(module: Module) -> Made:
    codes = stored(module.take("weight", E4M3, (None, None)))
    weight = dequantize(codes, _powers(module, codes), None, "fp8", 32)
    return Made(weight, "fp8", Rounding("mxfp8"), 32)


def _row_scale(module: Module, rows: int) -> Value:
    return reshape(stored(module.take("weight_scale", FLOATS, (rows,), (rows, 1))), (rows, 1))


def _powers(module: Module, codes: Value) -> Value:
    rows, inputs = codes.shape
    return unpack(stored(module.take("weight_scale", _E8M0, (rows, group_count(inputs, 32)))), "e8m0")


#: By quant_algo, in capitals. MXFP4 does not say whether x was rounded too; it is left alone.
ALGORITHMS: Final[Mapping[str, Callable[[Module], Made]]] = {
    "FP8": _fp8,
    "FP8_PER_CHANNEL_PER_TOKEN": _fp8_rows,
    "FP8_PB_WO": _fp8_blocks,
    "W8A16": _int8,
    "W8A8_SQ_PER_CHANNEL": _int8_smoothed,
    "W4A16_AWQ": _int4,
    "W4A8_AWQ": _int4_on_fp8,
    "NVFP4": _nvfp4,
    "NVFP4_AWQ": _nvfp4,
    "W4A16_NVFP4": _nvfp4_weight,
    "W4A8_NVFP4_FP8": _nvfp4_on_fp8,
    "MXFP4": _mxfp4,
    "W4A8_MXFP4_FP8": _mxfp4_on_fp8,
    "MXFP8": _mxfp8,
}
