"""GPTQ checkpoints (AutoGPTQ, GPTQModel): 4- and 8-bit codes packed along the inputs, in any order of them.

The two checkpoint formats differ in the stored zero points alone: v1 ("gptq") stores them minus one, v2
("gptq_v2") as they are. A label that the zero points contradict is refused where they show it: symmetric
weights have the middle code as zero point, and no zero point is 16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from castiron.errors import CheckpointError

from .expression import Value, arithmetic, first, gather, number, stored, transpose, unpack
from .fields import Fields, refuse_excluded
from .group_order import group_order
from .module import Module
from .scheme import Read
from .tensor import MadeTensor
from .zero_points import with_zero_points

_IRRELEVANT: Final = (
    *("damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "dataset", "tokenizer"),
    *("model_name_or_path", "model_file_base_name", "quantizer", "meta", "backend", "batch_size"),
    *("use_exllama", "disable_exllama", "exllama_config", "max_input_length", "cache_block_outputs"),
    *("block_name_to_quantize", "module_name_preceding_first_block", "modules_in_block_to_quantize"),
    *("pad_token_id", "use_cuda_fp16", "model_seqlen", "mse", "act_group_aware", "lm_head", "hessian"),
    *("fail_safe", "failsafe", "compute_device_filter", "offload_to_disk", "offload_to_disk_path"),
)


@dataclass(frozen=True)
class _Scheme:
    where: str
    bits: int
    group: int
    symmetric: bool
    desc_act: bool
    zeros_minus_one: bool


def read(config: Mapping[str, Any], where: str, modules: Mapping[str, Module]) -> Read:
    """See ``scheme.Reader``."""
    fields = Fields(config, where)
    fields.choice("quant_method", ("gptq", "gptqmodel"), "gptq")
    bits = fields.choice("bits", (4, 8))
    group = fields.integer("group_size")
    if group != -1 and group < 1:
        raise CheckpointError(f"{where}: group_size is {group}; expected -1 (the whole row) or more than 0.")
    fields.choice("pack_dtype", ("int32",), "int32")
    fields.empty("is_marlin_format", "adapter")
    scheme = _Scheme(
        where,
        bits,
        group,
        fields.flag("sym", True),
        fields.flag("desc_act", False),
        _checkpoint_format(fields) == "gptq",
    )
    _check_dynamic(fields)
    excluded = fields.texts("modules_to_not_convert")
    fields.irrelevant(*_IRRELEVANT)
    fields.finish()
    found = {name: module for name, module in modules.items() if "qweight" in module}
    if not found:
        raise CheckpointError(f"{where}: quant_method is 'gptq', but no module has a qweight.")
    refuse_excluded(found, excluded, where, "modules_to_not_convert")
    tensors = tuple(_module(module, scheme) for module in found.values())
    shown = "rows" if group == -1 else f"groups of {group}"
    return Read(tensors, f"gptq int{bits}, {shown}")


def _checkpoint_format(fields: Fields) -> str:
    """v1 or v2; the field has had two names, which must agree."""
    known = ("gptq", "gptq_v2")
    old = fields.choice("checkpoint_format", known, fields.raw("format", "gptq"))
    new = fields.choice("format", known, old)
    if old != new:
        raise CheckpointError(f"{fields.where}: checkpoint_format is {old!r} and format is {new!r}.")
    return old


def _check_dynamic(fields: Fields) -> None:
    """Rules by module: those that leave modules out ("-:") show in the tensors, others change the numbers."""
    rules = fields.raw("dynamic", {})
    changing = [rule for rule in rules if not str(rule).startswith("-:")]
    if changing:
        raise CheckpointError(
            f"{fields.where}: dynamic has the rule {changing[0]!r}, which gives some modules other bits or "
            "groups; this version reads one scheme for all modules."
        )


def _module(module: Module, scheme: _Scheme) -> MadeTensor:
    bits, per_word = scheme.bits, 32 // scheme.bits
    qweight = module.take("qweight", ("int32",), (None, None))
    inputs, outputs = qweight.shape[0] * per_word, qweight.shape[1]
    width = inputs if scheme.group == -1 else scheme.group
    groups = -(-inputs // width)
    scales = module.take("scales", ("float16", "bfloat16", "float32"), (groups, outputs))
    module.take("qzeros", ("int32",), (groups, -(-outputs // per_word)))
    order = _order(module, scheme, inputs, width)
    codes = transpose(unpack(stored(qweight), f"int{bits}_words_down"))
    zeros = _zeros(module, scheme, outputs, f"uint{bits}_words")
    if order is not None:
        codes = gather(codes, order, 1)
    kind, middle = f"int{bits}", 1 << (bits - 1)
    weight = with_zero_points(codes, transpose(stored(scales)), zeros, middle, kind, width)
    if order is not None:
        weight = gather(weight, np.argsort(order), 1)
    return MadeTensor(f"{module.name}.weight", weight, kind, also=module.taken)


def _order(module: Module, scheme: _Scheme, inputs: int, width: int) -> npt.NDArray[Any] | None:
    """The inputs in order of their groups; None: they are stored so."""
    if "g_idx" not in module:
        if scheme.desc_act and scheme.group != -1:
            raise CheckpointError(
                f"{scheme.where}: desc_act is true, but {module.name}.g_idx, which says the group of each "
                "input, is not stored. The checkpoint is incomplete."
            )
        return None
    order = group_order(module, "g_idx", inputs, width)
    if order is not None and not scheme.desc_act:
        raise CheckpointError(
            f"{scheme.where}: desc_act is false, but {module.name}.g_idx gives the inputs another order. "
            "Config and weights are of different checkpoints."
        )
    return order


def _zeros(module: Module, scheme: _Scheme, outputs: int, layout: str) -> Value | None:
    """Zero points [N, G] that count from 0; None where all are the middle code."""
    qzeros = module.peek("qzeros")
    middle, largest = 1 << (scheme.bits - 1), (1 << scheme.bits) - 1
    shift = int(scheme.zeros_minus_one)
    numbers = module.unpacked(qzeros, layout)[:, :outputs].astype(np.int64) + shift
    label = "gptq (v1)" if scheme.zeros_minus_one else "gptq_v2"
    if scheme.symmetric and not (numbers == middle).all():
        raise CheckpointError(
            f"{scheme.where}: sym is true and checkpoint_format is {label}, but {qzeros.name!r} then holds "
            f"zero points {numbers.min()} to {numbers.max()} where {middle} is expected. One of the two "
            "labels is wrong."
        )
    if numbers.max() > largest:
        raise CheckpointError(
            f"{scheme.where}: checkpoint_format is {label}, but {qzeros.name!r} then holds a zero point of "
            f"{numbers.max()}, which {scheme.bits}-bit codes do not have. It may be a gptq_v2 checkpoint."
        )
    if (numbers == middle).all():
        return None
    zeros = unpack(stored(qzeros), layout)
    zeros = first(zeros, outputs, 1)
    return arithmetic("Add", transpose(zeros), number(shift))
