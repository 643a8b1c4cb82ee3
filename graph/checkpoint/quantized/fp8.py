"""FP8 checkpoints (quant_method "fp8"): DeepSeek's 128x128 blocks, and the per-tensor kind of AutoFP8.

Block scales are stored as ``weight_scale_inv`` and multiply the codes, whatever the name says
(DeepSeek-V3 technical report and model code).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from castiron.errors import CheckpointError

from .expression import Value, dequantize, repeated_rows, reshape, stored, unpack
from .fields import Fields, refuse_excluded
from .kv_scales import kv_scales
from .module import FLOATS, Module
from .scheme import CacheNumbers, Read
from .tensor import MadeTensor, Rounding

E4M3 = ("float8_e4m3fn",)


def read(config: Mapping[str, Any], where: str, modules: Mapping[str, Module]) -> Read:
    """See ``scheme.Reader``."""
    fields = Fields(config, where)
    fields.choice("quant_method", ("fp8",))
    fields.choice("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    dynamic = fields.choice("activation_scheme", ("dynamic", "static"), "dynamic") == "dynamic"
    block = _block(fields)
    excluded = (*fields.texts("modules_to_not_convert"), *fields.texts("ignored_layers"))
    notes = []
    if "scale_fmt" in fields and fields.choice("scale_fmt", ("ue8m0",)):
        notes.append("activation scales are not rounded to powers of two (scale_fmt ue8m0): a finer grid")
    fields.irrelevant("dequantize", "is_checkpoint_fp8_serialized")
    fields.finish()
    found = {
        name: module
        for name, module in modules.items()
        if "weight" in module and module.peek("weight").dtype.name in E4M3
    }
    if not found:
        raise CheckpointError(f"{where}: quant_method is 'fp8', but no weight is stored as float8_e4m3fn.")
    refuse_excluded(found, excluded, where, "modules_to_not_convert")
    if block and not dynamic:
        raise CheckpointError(
            f"{where}: activation_scheme is 'static' with block scales; expected 'dynamic'."
        )
    tensors = tuple(_module(module, block, dynamic) for module in found.values())
    shown = f"blocks of {block[0]}x{block[1]}" if block else "one scale a tensor"
    used, k, v = kv_scales(modules)
    return Read(tensors, f"fp8, {shown}", CacheNumbers("auto", k, v), used, tuple(notes))


def _block(fields: Fields) -> tuple[int, int] | None:
    value = fields.raw("weight_block_size")
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(v, int) and v > 0 for v in value):
        raise CheckpointError(f"{fields.where}: weight_block_size is {value!r}; expected two sizes.")
    return value[0], value[1]


def _module(module: Module, block: tuple[int, int] | None, dynamic: bool) -> MadeTensor:
    name = f"{module.name}.weight"
    codes = stored(module.take("weight", E4M3, (None, None)))
    if block:
        weight = in_blocks(module, "weight_scale_inv", codes, block)
        return MadeTensor(name, weight, "fp8", rounding=Rounding("fp8", block[1]), also=module.taken)
    suffix = "weight_scale_inv" if "weight_scale_inv" in module else "weight_scale"
    weight = dequantize(codes, one_scale(module, suffix, codes.shape[0]), None, "fp8", 0)
    x_scale = 0.0
    if not dynamic:
        x_scale = module.scalar("activation_scale" if "activation_scale" in module else "input_scale")
    return MadeTensor(name, weight, "fp8", rounding=Rounding("fp8", 0, x_scale), also=module.taken)


def one_scale(module: Module, suffix: str, rows: int) -> Value:
    """A tensor's only scale as a scale of each row, [N, 1]."""
    module.scalar(suffix)  # what it says is checked; what is used stays in the file
    scale = reshape(stored(module.take(suffix, FLOATS, (), (1,), (1, 1))), (1, 1))
    return repeated_rows(scale, rows, rows)


def in_blocks(module: Module, suffix: str, codes: Value, block: tuple[int, int]) -> Value:
    """The weight of codes with a scale for each block of ``block`` rows and columns."""
    rows, inputs = codes.shape
    grid = (-(-rows // block[0]), -(-inputs // block[1]))
    scale = module.take(suffix, (*FLOATS, "float8_e8m0fnu"), grid, (grid[0], 1, grid[1], 1))
    numbers = reshape(stored(scale), grid)
    if scale.dtype.name == "float8_e8m0fnu":
        numbers = unpack(numbers, "e8m0")
    group = 0 if block[1] >= inputs else block[1]
    return dequantize(codes, repeated_rows(numbers, rows, block[0]), None, "fp8", group)
