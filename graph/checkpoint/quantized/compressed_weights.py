"""How compressed-tensors lays the codes of a weight out: one function for each compressor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from castiron.errors import CheckpointError

from ...weights.quantized import group_count
from .expression import (
    Value,
    arithmetic,
    dequantize,
    first,
    gather,
    reshape,
    stored,
    unpack,
)
from .fields import Fields
from .fp8 import E4M3, in_blocks, one_scale
from .group_order import group_order
from .module import FLOATS, Module
from .zero_points import with_zero_points


@dataclass(frozen=True)
class WeightArgs:
    """What a config group says of weights.

    ``strategy`` is one of tensor, channel, group, block; ``group``: inputs a scale, 0 the row.
    """

    where: str
    bits: int
    kind: str
    symmetric: bool
    strategy: str
    group: int
    block: tuple[int, int] | None
    permuted: bool

    @classmethod
    def read(cls, fields: Fields, format: str) -> WeightArgs:
        """The arguments, checked against what the format can hold."""
        bits = fields.choice("num_bits", (8, 4), 8)
        kind = fields.choice("type", ("int", "float"), "int")
        symmetric = fields.flag("symmetric", True)
        size = fields.raw("group_size")
        fallback = "tensor" if size is None else "channel" if size == -1 else "group"
        strategy = fields.choice(
            "strategy", ("tensor", "channel", "group", "block", "tensor_group"), fallback
        )
        fields.choice("dynamic", (False,), False)
        order = fields.choice("actorder", ("group", "dynamic", "weight", "static", True, False), False)
        structure = fields.raw("block_structure")
        fields.irrelevant("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
        fields.finish()
        wanted = _HOLDS[format]
        if (bits, kind) not in wanted:
            shown = " or ".join(f"{b}-bit {k}" for b, k in wanted)
            raise CheckpointError(f"{fields.where}: {bits}-bit {kind} in {format}; expected {shown}.")
        grouped = strategy in ("group", "tensor_group")
        if grouped and not (isinstance(size, int) and size > 0):
            raise CheckpointError(f"{fields.where}: strategy {strategy!r} with group_size {size!r}.")
        block = None
        if strategy == "block":
            sizes = structure if isinstance(structure, list) else str(structure).split("x")
            if len(sizes) != 2 or not all(str(entry).isdigit() and int(entry) > 0 for entry in sizes):
                raise CheckpointError(
                    f"{fields.where}: block_structure is {structure!r}; expected two sizes."
                )
            block = (int(sizes[0]), int(sizes[1]))
        permuted = order in ("group", "dynamic", True)
        return cls(fields.where, bits, kind, symmetric, strategy, size if grouped else 0, block, permuted)


#: Bits and type of weights that each format is written for.
_HOLDS: Final[Mapping[str, tuple[tuple[int, str], ...]]] = {
    "pack-quantized": ((4, "int"), (8, "int")),
    "int-quantized": ((8, "int"),),
    "float-quantized": ((8, "float"),),
    "naive-quantized": ((8, "int"), (8, "float")),
    "nvfp4-pack-quantized": ((4, "float"),),
    "mxfp4-pack-quantized": ((4, "float"),),
    "mxfp8-quantized": ((8, "float"),),
}


def _packed(module: Module, args: WeightArgs) -> tuple[Value, str]:
    """Integers in 32-bit words along the inputs, the width of the row stored beside them."""
    sizes = module.array(module.take("weight_shape", ("int64", "int32"), (2,)))
    rows, inputs = int(sizes[0]), int(sizes[1])
    per_word = 32 // args.bits
    packed = module.take("weight_packed", ("int32",), (rows, -(-inputs // per_word)))
    layout = f"int{args.bits}_words"
    codes = first(unpack(stored(packed), layout), inputs, 1)
    return _integers(module, args, codes, packed_zeros=True), f"int{args.bits}"


def _plain(module: Module, args: WeightArgs) -> tuple[Value, str]:
    """Codes as they are, one a byte."""
    dtypes = ("int8",) if args.kind == "int" else E4M3
    codes = stored(module.take("weight", dtypes, (None, None)))
    if args.kind == "int":
        return _integers(module, args, codes, packed_zeros=False), "int8"
    if not args.symmetric:
        raise CheckpointError(f"{args.where}: symmetric is false; float codes have no zero point.")
    if args.block:
        return in_blocks(module, "weight_scale", codes, args.block), "fp8"
    return dequantize(codes, _scale(module, args, *codes.shape), None, "fp8", args.group), "fp8"


def _integers(module: Module, args: WeightArgs, codes: Value, *, packed_zeros: bool) -> Value:
    rows, inputs = codes.shape
    scale = _scale(module, args, rows, inputs)
    width = args.group or inputs
    order = group_order(module, "weight_g_idx", inputs, width) if args.permuted else None
    zeros = _zero_points(module, args, scale.shape, packed=packed_zeros)
    if order is not None:
        codes = gather(codes, order, 1)
    weight = with_zero_points(codes, scale, zeros, 0, f"int{args.bits}", width)
    return weight if order is None else gather(weight, np.argsort(order), 1)


def _scale(module: Module, args: WeightArgs, rows: int, inputs: int) -> Value:
    """Scales [N, G] of any strategy but blocks."""
    if args.strategy == "tensor":
        return one_scale(module, "weight_scale", rows)
    groups = group_count(inputs, args.group)
    shapes = [(rows, groups), *([(rows,)] if args.strategy == "channel" else [])]
    return reshape(stored(module.take("weight_scale", FLOATS, *shapes)), (rows, groups))


def _zero_points(module: Module, args: WeightArgs, shape: tuple[int, ...], *, packed: bool) -> Value | None:
    """Zero points [N, G], around zero like the codes; None where all are zero."""
    suffix = "weight_zero_point"
    if args.symmetric:
        if suffix in module and module.array(module.accept(suffix)).any():
            raise CheckpointError(
                f"{args.where}: symmetric is true, but {module.name}.{suffix} is not zero. Config and "
                "weights are of different checkpoints."
            )
        return None
    if args.strategy not in ("group", "channel"):
        raise CheckpointError(f"{args.where}: zero points with strategy {args.strategy!r} are not read.")
    if packed and args.bits < 8:
        tensor = module.take(suffix, ("int32",), (-(-shape[0] * args.bits // 32), shape[1]))
        layout = f"int{args.bits}_words_down"
        numbers = module.unpacked(tensor, layout)[: shape[0]]
        zeros = first(unpack(stored(tensor), layout), shape[0], 0)
    else:
        tensor = module.take(suffix, ("int8",), shape)
        numbers, zeros = module.array(tensor), stored(tensor)
    return zeros if numbers.any() else None


def _nvfp4(module: Module, args: WeightArgs) -> tuple[Value, str]:
    """e2m1 pairs with e4m3 scales for 16 inputs; the global scale is stored as 2688 / amax."""
    codes, rows, inputs = _fp4(module, args, 16)
    scale = module.take("weight_scale", E4M3, (rows, -(-inputs // 16)))
    module.scalar("weight_global_scale")
    over = reshape(stored(module.peek("weight_global_scale")), (1, 1))
    by_group = arithmetic("Div", unpack(stored(scale), "e4m3"), over)
    return dequantize(codes, by_group, None, "fp4", 16), "fp4"


def _mxfp4(module: Module, args: WeightArgs) -> tuple[Value, str]:
    """e2m1 pairs with powers of two for 32 inputs."""
    codes, rows, inputs = _fp4(module, args, 32)
    return dequantize(codes, _powers(module, rows, inputs), None, "fp4", 32), "fp4"


def _mxfp8(module: Module, args: WeightArgs) -> tuple[Value, str]:
    """e4m3 codes with powers of two for 32 inputs."""
    if args.group != 32:
        raise CheckpointError(f"{args.where}: group_size is {args.group}; expected 32 in mxfp8-quantized.")
    codes = stored(module.take("weight", E4M3, (None, None)))
    return dequantize(codes, _powers(module, *codes.shape), None, "fp8", 32), "fp8"


def _fp4(module: Module, args: WeightArgs, group: int) -> tuple[Value, int, int]:
    if args.group != group or not args.symmetric:
        raise CheckpointError(
            f"{args.where}: group_size is {args.group}, symmetric {args.symmetric}; expected {group}, True."
        )
    packed = module.take("weight_packed", ("uint8",), (None, None))
    codes = unpack(stored(packed), "fp4_pairs")
    return codes, codes.shape[0], codes.shape[1]


def _powers(module: Module, rows: int, inputs: int) -> Value:
    scale = module.take("weight_scale", ("uint8", "float8_e8m0fnu"), (rows, -(-inputs // 32)))
    return unpack(stored(scale), "e8m0")


#: By the config's name of the format: the weight, and what its codes are.
FORMATS: Final[Mapping[str, Callable[[Module, WeightArgs], tuple[Value, str]]]] = {
    "pack-quantized": _packed,
    "int-quantized": _plain,
    "float-quantized": _plain,
    "naive-quantized": _plain,
    "nvfp4-pack-quantized": _nvfp4,
    "mxfp4-pack-quantized": _mxfp4,
    "mxfp8-quantized": _mxfp8,
}
