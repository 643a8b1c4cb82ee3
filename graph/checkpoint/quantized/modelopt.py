"""NVIDIA ModelOpt checkpoints: the two forms of their config, and which algorithm each module has.

How codes lie in the file is in ``modelopt_weights``. Sources: modelopt/torch/export (convert_hf_config.py,
quant_utils.py), decoded checkpoints of every kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from castiron.errors import CheckpointError

from ...quant_plan import CacheFormat
from .fields import Fields, refuse_excluded
from .kv_scales import kv_scales
from .modelopt_weights import ALGORITHMS
from .module import Module
from .scheme import CacheNumbers, Read
from .tensor import MadeTensor

#: No quant_algo: the weights are as they were, and only the cache is quantized.
_NONE: Final = "NONE"
_CACHE: Final[Mapping[str, CacheFormat]] = {"FP8": "fp8", "INT8": "int8"}


@dataclass(frozen=True)
class _Config:
    """What both forms of the config say: algorithm of all modules or by module, cache, modules left out."""

    algorithm: str
    group: int | None
    by_module: Mapping[str, tuple[str, int | None]]
    cache: object
    excluded: tuple[str, ...]


def read(config: Mapping[str, Any], where: str, modules: Mapping[str, Module]) -> Read:
    """See ``scheme.Reader``."""
    fields = Fields(config, where)
    fields.choice("quant_method", ("modelopt", "modelopt_fp4"), "modelopt")
    fields.irrelevant("producer", "quantization_status", "version")
    parsed = _nested(fields) if "quantization" in fields else _flat(fields)
    fields.finish()
    found = {name: module for name, module in modules.items() if "weight_scale" in module}
    if not found and parsed.algorithm != _NONE:
        raise CheckpointError(
            f"{where}: quant_algo is {parsed.algorithm!r}, but no module has a weight_scale."
        )
    refuse_excluded(found, parsed.excluded, where, "exclude_modules")
    tensors = [_module(module, parsed, where) for module in found.values()]
    format, notes = _cache(parsed.cache, where)
    used, k, v = kv_scales(modules)
    description = f"modelopt {'cache' if parsed.algorithm == _NONE else parsed.algorithm.lower()}"
    return Read(tuple(tensors), description, CacheNumbers(format, k, v), used, notes)


def _nested(fields: Fields) -> _Config:
    """hf_quant_config.json: {"producer": ..., "quantization": {...}}."""
    inner = Fields(fields.raw("quantization"), f"{fields.where}: quantization")
    parsed = _Config(
        _algorithm(inner, "quant_algo"),
        inner.raw("group_size"),
        _by_module(inner),
        inner.raw("kv_cache_quant_algo"),
        inner.texts("exclude_modules"),
    )
    _no_zero_points(inner)
    inner.irrelevant("pre_quant_scale", "awq_block_size", "calibration")  # the tensors show the first
    inner.finish()
    return parsed


def _flat(fields: Fields) -> _Config:
    """quantization_config of config.json: the same, in the words of compressed-tensors."""
    algorithm = _algorithm(fields, "quant_algo")
    _no_zero_points(fields)
    # A restatement of quant_algo; groups of ModelOpt's own formats follow from the shapes.
    fields.irrelevant("config_groups", "pre_quant_scale")
    cache = fields.raw("kv_cache_scheme", fields.raw("kv_cache_quant_algo"))
    excluded = (*fields.texts("ignore"), *fields.texts("exclude_modules"))
    return _Config(algorithm, fields.raw("group_size"), _by_module(fields), cache, excluded)


def _algorithm(fields: Fields, name: str) -> str:
    value = fields.raw(name)
    known = (*ALGORITHMS, "MIXED_PRECISION")
    if value is None:
        return _NONE
    if not isinstance(value, str) or value.upper() not in known:
        raise CheckpointError(f"{fields.where}: {name} is {value!r}; this version reads {', '.join(known)}.")
    return value.upper()


def _by_module(fields: Fields) -> dict[str, tuple[str, int | None]]:
    found = {}
    for module, values in dict(fields.raw("quantized_layers", {})).items():
        layer = Fields(values, f"{fields.where}: quantized_layers.{module}")
        found[module] = (_algorithm(layer, "quant_algo"), layer.raw("group_size"))
        _no_zero_points(layer)
        layer.irrelevant("pre_quant_scale")
        layer.finish()
    return found


def _no_zero_points(fields: Fields) -> None:
    fields.choice("has_zero_point", (False,), False)


def _module(module: Module, config: _Config, where: str) -> MadeTensor:
    algorithm, group = config.algorithm, config.group
    if algorithm == _NONE:
        raise CheckpointError(
            f"{where}: quant_algo is null, but {module.name!r} has a weight_scale. Config and weights are of "
            "different checkpoints."
        )
    if algorithm == "MIXED_PRECISION":
        if module.name not in config.by_module:
            raise CheckpointError(
                f"{where}: quant_algo is MIXED_PRECISION, and quantized_layers does not name "
                f"{module.name!r}, which has a weight_scale. Config and weights are of different checkpoints."
            )
        algorithm, group = config.by_module[module.name]
    made = ALGORITHMS[algorithm](module)
    if group and made.group and group != made.group:
        raise CheckpointError(
            f"{where}: group_size is {group}, but the scales of {module.name!r} are for {made.group} inputs."
        )
    input_scale = None
    if "pre_quant_scale" in module:
        input_scale = module.input_scale("pre_quant_scale", made.weight.shape[1])
    return MadeTensor(
        f"{module.name}.weight", made.weight, made.kind, input_scale, made.rounding, module.taken
    )


def _cache(value: object, where: str) -> tuple[CacheFormat, tuple[str, ...]]:
    if value is None:
        return "auto", ()
    if isinstance(value, Mapping):
        scheme = Fields(value, f"{where}: kv_cache_scheme")
        bits, kind = scheme.choice("num_bits", (8,)), scheme.choice("type", ("float", "int"))
        scheme.choice("dynamic", (False,), False)
        scheme.finish()
        value = f"{'FP' if kind == 'float' else 'INT'}{bits}"
    if value in _CACHE:
        return _CACHE[str(value)], ()
    if value == "NVFP4":
        return "auto", (
            "the checkpoint was made for a 4-bit KV cache (NVFP4); the engine's is not quantized",
        )
    raise CheckpointError(
        f"{where}: kv_cache_quant_algo is {value!r}; this version reads {', '.join(_CACHE)}, NVFP4."
    )
