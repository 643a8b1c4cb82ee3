"""AWQ checkpoints (AutoAWQ, gemm layout): 4-bit codes with a zero point and a scale for each group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from castiron.errors import CheckpointError

from .expression import stored, transpose, unpack
from .fields import Fields, refuse_excluded
from .module import Module
from .scheme import Read
from .tensor import MadeTensor
from .zero_points import with_zero_points


def read(config: Mapping[str, Any], where: str, modules: Mapping[str, Module]) -> Read:
    """See ``scheme.Reader``."""
    fields = Fields(config, where)
    fields.choice("quant_method", ("awq",), "awq")
    # AutoAWQ's own file has other names for two of them
    fields.choice("bits", (4,), fields.raw("w_bit"))
    group = fields.integer("group_size", fields.raw("q_group_size"))
    if group != -1 and group < 1:
        raise CheckpointError(f"{where}: group_size is {group}; expected -1 (the whole row) or more than 0.")
    zero_point = fields.flag("zero_point", True)
    for name in ("version", "format"):
        fields.choice(name, ("gemm", "GEMM"), "gemm")
    excluded = fields.texts("modules_to_not_convert")
    fields.irrelevant("backend", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config", "desc")
    fields.finish()
    found = {name: module for name, module in modules.items() if "qweight" in module}
    if not found:
        raise CheckpointError(f"{where}: quant_method is 'awq', but no module has a qweight.")
    refuse_excluded(found, excluded, where, "modules_to_not_convert")
    tensors = tuple(_module(module, group, zero_point, where) for module in found.values())
    return Read(tensors, f"awq int4, {'rows' if group == -1 else f'groups of {group}'}")


def _module(module: Module, group: int, zero_point: bool, where: str) -> MadeTensor:
    qweight = module.take("qweight", ("int32",), (None, None))
    inputs, words = qweight.shape
    outputs, width = words * 8, inputs if group == -1 else group
    groups = -(-inputs // width)
    scales = module.take("scales", ("float16", "bfloat16", "float32"), (groups, outputs))
    qzeros = module.take("qzeros", ("int32",), (groups, words))
    codes = transpose(unpack(stored(qweight), "int4_words_awq"))
    zeros = unpack(stored(qzeros), "uint4_words_awq")
    middle = module.unpacked(qzeros, "uint4_words_awq") == 8
    if not zero_point and not middle.all():
        raise CheckpointError(
            f"{where}: zero_point is false, but {qzeros.name!r} holds other zero points than 8. Config and "
            "weights are of different checkpoints."
        )
    weight = with_zero_points(
        codes, transpose(stored(scales)), None if middle.all() else transpose(zeros), 8, "int4", width
    )
    return MadeTensor(f"{module.name}.weight", weight, "int4", also=module.taken)
