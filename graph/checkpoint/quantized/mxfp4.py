"""MXFP4 checkpoints (quant_method "mxfp4"): gpt-oss, whose experts are e2m1 in blocks of 32 inputs.

The matrices of a layer's experts are stored together: ``<name>_blocks`` uint8 [E, N, K / 32, 16], two codes a
byte, the low half first, and ``<name>_scales`` uint8 [E, N, K / 32], exponents of two with a bias of 127 (OCP
Microscaling Formats 1.0). The parameter ``<name>`` of transformers' gpt-oss is [E, K, N].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from castiron.errors import CheckpointError

from .expression import dequantize, reshape, stored, transpose, unpack
from .fields import Fields, refuse_excluded
from .module import Module
from .scheme import Read
from .tensor import MadeTensor

_BLOCKS: Final = "_blocks"
_GROUP: Final = 32
_BYTES: Final = 16


def read(config: Mapping[str, Any], where: str, modules: Mapping[str, Module]) -> Read:
    """See ``scheme.Reader``."""
    fields = Fields(config, where)
    fields.choice("quant_method", ("mxfp4",))
    excluded = fields.texts("modules_to_not_convert")
    fields.irrelevant("dequantize")
    fields.finish()
    found = {
        f"{name}.{suffix.removesuffix(_BLOCKS)}": module
        for name, module in modules.items()
        for suffix in module.suffixes
        if suffix.endswith(_BLOCKS)
    }
    if not found:
        raise CheckpointError(f"{where}: quant_method is 'mxfp4', but no tensor '..._blocks' is stored.")
    refuse_excluded(found, excluded, where, "modules_to_not_convert")
    tensors = tuple(_parameter(name, module) for name, module in found.items())
    return Read(tensors, f"mxfp4, blocks of {_GROUP}")


def _parameter(name: str, module: Module) -> MadeTensor:
    suffix = name.rpartition(".")[2]
    blocks = module.take(f"{suffix}{_BLOCKS}", ("uint8",), (None, None, None, _BYTES))
    experts, outputs, groups, _ = blocks.shape
    scales = module.take(f"{suffix}_scales", ("uint8", "float8_e8m0fnu"), (experts, outputs, groups))
    rows, inputs = experts * outputs, groups * _GROUP
    codes = unpack(reshape(stored(blocks), (rows, inputs // 2)), "fp4_pairs")
    exponents = unpack(reshape(stored(scales), (rows, groups)), "e8m0")
    matrices = dequantize(codes, exponents, None, "fp4", _GROUP)
    return MadeTensor(name, transpose(reshape(matrices, (experts, outputs, inputs))), "mxfp4")
