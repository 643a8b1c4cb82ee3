"""compressed-tensors checkpoints (llm-compressor): the config, and which scheme each module has.

How codes lie in the file is in ``compressed_weights``. Sources: compressed_tensors/quantization
(quant_args.py, quant_scheme.py) and compressed_tensors/compressors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from castiron.errors import CheckpointError

from ...quant_plan import ActivationFormat
from .compressed_weights import FORMATS, WeightArgs
from .fields import Fields, names_module, refuse_excluded
from .kv_scales import kv_scales
from .module import Module
from .scheme import CacheNumbers, Read
from .tensor import MadeTensor, Rounding

#: Suffixes that only a quantized module has.
_MARKS: Final = ("weight_packed", "weight_scale")


@dataclass(frozen=True)
class _Group:
    targets: tuple[str, ...]
    format: str
    weights: WeightArgs
    rounding: Rounding
    static_x: bool


def read(config: Mapping[str, Any], where: str, modules: Mapping[str, Module]) -> Read:
    """See ``scheme.Reader``."""
    fields = Fields(config, where)
    fields.choice("quant_method", ("compressed-tensors", "sparseml"), "compressed-tensors")
    fields.choice("quantization_status", ("compressed", "frozen"), "compressed")
    common = fields.raw("format", "dense")
    ignore = fields.texts("ignore")
    _no_transforms(fields)
    fields.irrelevant("global_compression_ratio", "version")
    groups = [
        _group(Fields(group, f"{where}: config_groups.{name}"), common)
        for name, group in dict(fields.raw("config_groups", {})).items()
    ]
    cache_format = _cache(fields, where)
    fields.finish()
    found = {name: m for name, m in modules.items() if any(mark in m for mark in _MARKS)}
    if not found or not groups:
        raise CheckpointError(
            f"{where}: quant_method is 'compressed-tensors', but it has {len(groups)} config_groups and "
            f"{len(found)} modules with scales."
        )
    refuse_excluded(found, ignore, where, "ignore")
    tensors = [_module(module, _scheme_of(name, groups, where)) for name, module in found.items()]
    used, k, v = kv_scales(modules)
    kinds = sorted({group.format for group in groups})
    cache = CacheNumbers(cache_format, k, v)
    return Read(tuple(tensors), f"compressed-tensors {', '.join(kinds)}", cache, used)


def _no_transforms(fields: Fields) -> None:
    """Sparse storage and rotations of weights are other ways of storing numbers: they must be absent."""
    sparsity = fields.raw("sparsity_config", {})
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") == "dense":
        sparsity = {}
    if sparsity:
        raise CheckpointError(f"{fields.where}: sparsity_config is {sparsity!r}; expected none or 'dense'.")
    fields.empty("transform_config")


def _group(fields: Fields, common: str) -> _Group:
    targets = fields.texts("targets")
    if not targets:
        raise CheckpointError(f"{fields.where}: targets is empty; expected module names or classes.")
    format = fields.raw("format", common)
    if format not in FORMATS:
        raise CheckpointError(
            f"{fields.where}: format is {format!r}; this version reads {', '.join(FORMATS)}."
        )
    weights = WeightArgs.read(Fields(fields.raw("weights", None), f"{fields.where}.weights"), format)
    rounding, static_x = Rounding(), False
    if "input_activations" in fields:
        where = f"{fields.where}.input_activations"
        rounding, static_x = _activations(Fields(fields.raw("input_activations"), where), format)
    fields.empty("output_activations")
    fields.finish()
    return _Group(targets, format, weights, rounding, static_x)


def _activations(fields: Fields, format: str) -> tuple[Rounding, bool]:
    """How x is rounded, and whether its scale is stored beside the weight."""
    bits = fields.choice("num_bits", (8, 4), 8)
    kind = fields.choice("type", ("int", "float"), "int")
    if not fields.flag("symmetric", True):
        raise CheckpointError(
            f"{fields.where}: symmetric is false; activations with a zero point are not read."
        )
    strategy = fields.raw("strategy", "tensor" if "group_size" not in fields else "group")
    dynamic = fields.choice("dynamic", (True, False, "local"), False)
    group = fields.raw("group_size")
    fields.irrelevant("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
    fields.empty("actorder", "block_structure")
    fields.finish()
    if (bits, kind) == (4, "float"):
        if (strategy, group) == ("tensor_group", 16) and format == "nvfp4-pack-quantized":
            return Rounding("nvfp4"), dynamic is not True  # "local": the global scale is stored
        if (strategy, group) == ("group", 32) and dynamic is True:
            return Rounding("mxfp4"), False
    if (bits, kind, strategy, group) == (8, "float", "group", 32) and format.startswith("mxfp"):
        return Rounding("mxfp8"), False
    if bits == 8:
        x_format: ActivationFormat = "int8" if kind == "int" else "fp8"
        if strategy == "tensor" and dynamic is False:
            return Rounding(x_format), True
        # A scale of the whole batch would make rows depend on their neighbours; a row's own is finer
        if strategy in ("token", "tensor") and dynamic is True:
            return Rounding(x_format), False
        if strategy == "group" and dynamic is True and isinstance(group, int) and group > 0:
            return Rounding(x_format, group), False
    raise CheckpointError(
        f"{fields.where}: {bits}-bit {kind} by {strategy!r} (group_size {group}, dynamic {dynamic}) is not a "
        "way of rounding activations that this version knows."
    )


def _scheme_of(module: str, groups: Sequence[_Group], where: str) -> _Group:
    """The group whose targets name the module: by name before by class."""
    for by_class in (False, True):
        for group in groups:
            for target in group.targets:
                is_class = not target.startswith("re:") and re.fullmatch(r"[A-Z]\w*", target) is not None
                if is_class == by_class and (by_class or names_module(target, module)):
                    return group
    raise CheckpointError(
        f"{where}: {module!r} is stored as codes, but no config group's targets name it. Config and weights "
        "are of different checkpoints."
    )


def _module(module: Module, group: _Group) -> MadeTensor:
    weight, kind = FORMATS[group.format](module, group.weights)
    rounding = group.rounding
    if "input_zero_point" in module and module.array(module.accept("input_zero_point")).any():
        raise CheckpointError(f"module {module.name!r}: its input_zero_point is not zero, which is not read.")
    if group.static_x:
        if rounding.x_format == "nvfp4":
            x_scale = 1 / module.scalar("input_global_scale")  # stored as 2688 / amax
        else:
            x_scale = module.scalar("input_scale")
        rounding = Rounding(rounding.x_format, rounding.x_group, x_scale)
    return MadeTensor(f"{module.name}.weight", weight, kind, rounding=rounding, also=module.taken)


def _cache(fields: Fields, where: str) -> Any:
    """The cache's format by kv_cache_scheme."""
    if "kv_cache_scheme" not in fields:
        return "auto"
    scheme = Fields(fields.raw("kv_cache_scheme"), f"{where}: kv_cache_scheme")
    scheme.choice("num_bits", (8,))
    kind = scheme.choice("type", ("float", "int"))
    scheme.choice("symmetric", (True,), True)
    scheme.choice("strategy", ("tensor",), "tensor")
    scheme.choice("dynamic", (False,), False)
    scheme.irrelevant("observer", "observer_kwargs", "scale_dtype", "zp_dtype", "group_size")
    scheme.empty("actorder", "block_structure")
    scheme.finish()
    return "fp8" if kind == "float" else "int8"
