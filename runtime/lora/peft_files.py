"""A PEFT adapter's two files, distrusted: what is not understood is refused by name, not ignored.

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from castiron.errors import EngineError

from ...engines.files import open_regular, read_bounded, read_exact
from ...engines.weights_file import TensorEntry, read_header
from ..request_errors import AdapterError

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_MAX_CONFIG_BYTES = 4 << 20
_MAX_ALPHA = 1e6
#: Of a pattern: it is tried on every module, and with few repetitions, none of a group, no match takes long.
_MAX_PATTERN, _MAX_REPETITIONS, _MAX_CHOICES = 512, 4, 4096
_PREFIX = "base_model.model."
_DTYPES: Mapping[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}

#: Fields of PEFT's LoraConfig that change nothing at inference, or that the tensors show by themselves.
_NEUTRAL = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("lora_dropout", "fan_in_fan_out", "megatron_core", "runtime_config", "peft_version"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
    )
)
#: Fields that are read.
_READ = frozenset(
    (
        "peft_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "bias",
        "init_lora_weights",
    )
)
#: Ways to start the training that leave the model's own weights as they are.
_INITS = (True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class LoraModule:
    """What an adapter adds to one module: y += scale * (x aᵀ) bᵀ. ``a`` is f32 [rank, inputs], ``b`` f32
    [outputs, rank].
    """

    a: npt.NDArray[np.float32]
    b: npt.NDArray[np.float32]
    scale: float


def read_adapter(
    folder: str | os.PathLike[str], sizes: Mapping[str, tuple[int, int]], max_rank: int
) -> dict[str, LoraModule]:
    """The modules of an adapter, by their paths in the source model.

    Args:
        sizes: (inputs, outputs) of the engine's modules that adapters can add to.
        max_rank: of any module.

    Raises:
        AdapterError: the files are missing, damaged or contradict each other; the adapter was made for
            another model, has a larger rank, or uses something that is not understood.
    """
    path = Path(folder)
    try:
        config = _read_config(path)
        tensors = _Tensors(path)
    except EngineError as e:
        raise AdapterError(f"the adapter in {folder} cannot be read: {e}") from None
    try:
        return _modules(config, tensors, sizes, max_rank)
    except (EngineError, AdapterError) as e:
        raise AdapterError(f"the adapter in {folder} cannot be used: {e}") from None


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads(read_bounded(_resolved(folder, CONFIG_FILE), _MAX_CONFIG_BYTES))
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise EngineError(f"{CONFIG_FILE} is not a JSON object.")
    return config


def _resolved(folder: Path, name: str) -> Path:
    """The file itself: the Hugging Face cache keeps links to it."""
    if not os.path.isdir(folder):  # Path.is_dir raises where it may not look
        raise EngineError(f"there is no such folder; expected one with {CONFIG_FILE} and {WEIGHTS_FILE}.")
    pickled = folder / "adapter_model.bin"
    if name == WEIGHTS_FILE and not os.path.exists(folder / name) and os.path.exists(pickled):
        raise EngineError(f"it holds adapter_model.bin, a pickle, instead of {WEIGHTS_FILE}; save it again.")
    return Path(os.path.realpath(folder / name))


class _Tensors:
    """The tensors of adapter_model.safetensors, read when asked for."""

    def __init__(self, folder: Path) -> None:
        self._path = _resolved(folder, WEIGHTS_FILE)
        try:
            self.entries = read_header(self._path, WEIGHTS_FILE, align=1)
        except OSError as e:
            raise EngineError(f"{WEIGHTS_FILE} is missing or unreadable ({e.strerror}).") from None

    def matrix(self, name: str, shape: tuple[int, int], wanted: str) -> npt.NDArray[np.float32]:
        """A matrix in float32; ``wanted`` says what its shape should be, for the message."""
        entry = self.entries[name]
        if entry.shape != shape:
            raise AdapterError(f"{name} has shape {list(entry.shape)}; expected {list(shape)}, {wanted}.")
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            raise AdapterError(f"{name} is of {entry.dtype}; expected {', '.join(_DTYPES)}.")
        try:
            with open_regular(self._path) as file:
                file.seek(entry.offset)
                data = read_exact(file, entry.nbytes, WEIGHTS_FILE)
        except OSError as e:
            raise EngineError(f"{WEIGHTS_FILE} cannot be read ({e.strerror}).") from None
        matrix = np.frombuffer(data, dtype).reshape(shape).astype(np.float32)
        if not np.isfinite(matrix).all():
            raise AdapterError(f"{name} holds NaN or infinity; the adapter is damaged.")
        return np.ascontiguousarray(matrix)


def _modules(
    config: Mapping[str, Any], tensors: _Tensors, sizes: Mapping[str, tuple[int, int]], max_rank: int
) -> dict[str, LoraModule]:
    _check_config(config)
    found: dict[str, LoraModule] = {}
    for module in _paths(tensors.entries):
        if module not in sizes:
            known = ", ".join(sorted({name.rpartition(".")[2] for name in sizes}))
            raise AdapterError(
                f"it adapts {module!r}, which is no module of this engine that takes adapters; those are the "
                f"layers' {known}."
            )
        inputs, outputs = sizes[module]
        rank = _rank(config, module, max_rank)
        names = [f"{_PREFIX}{module}.lora_{which}.weight" for which in ("A", "B")]
        for name in names:
            if name not in tensors.entries:
                raise AdapterError(f"{name} is missing.")
        a = tensors.matrix(names[0], (rank, inputs), "rank and the module's inputs")
        b = tensors.matrix(names[1], (outputs, rank), "the module's outputs and rank")
        found[module] = LoraModule(a, b, _scale(config, module, rank))
    if not found:
        raise AdapterError(f"{WEIGHTS_FILE} holds no tensors.")
    return found


def _paths(names: Mapping[str, TensorEntry]) -> list[str]:
    paths: dict[str, None] = {}
    for name in names:
        match = re.fullmatch(r"base_model\.model\.(.+)\.lora_[AB]\.weight", name)
        if match is None:
            raise AdapterError(
                f"it holds {name[:200]!r}, which is not lora_A or lora_B of a linear module (embeddings, "
                "DoRA, biases and whole modules are not supported); merge the adapter into the checkpoint "
                "instead."
            )
        paths[match[1]] = None
    return list(paths)


def _check_config(config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"peft_type is {config.get('peft_type')!r}; expected 'LORA'.")
    if config.get("bias", "none") != "none":
        raise AdapterError(f"bias is {config['bias']!r}, and biases of adapters are not supported.")
    init = config.get("init_lora_weights", True)
    if not any(init is known or (isinstance(known, str) and init == known) for known in _INITS):
        raise AdapterError(
            f"init_lora_weights is {init!r}, which changes the model's own weights; save the adapter "
            "converted to plain LoRA (PEFT: path_initial_model_for_weight_conversion)."
        )
    for name, value in config.items():
        if name not in _NEUTRAL | _READ and value not in (None, False, 0, "", [], {}):
            raise AdapterError(
                f"its config says {name[:80]} = {str(value)[:80]}, which is not supported; merge the adapter "
                "into the checkpoint instead."
            )


def _rank(config: Mapping[str, Any], module: str, max_rank: int) -> int:
    rank = _by_pattern(config, "rank_pattern", module, config.get("r"))
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise AdapterError(f"the rank of {module!r} is {rank!r}; expected an integer of at least 1.")
    if rank > max_rank:
        raise AdapterError(
            f"the rank of {module!r} is {rank}, and this engine was started for at most {max_rank}; raise "
            "--max-lora-rank."
        )
    return rank


def _scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    alpha = _by_pattern(config, "alpha_pattern", module, config.get("lora_alpha"))
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not abs(alpha) <= _MAX_ALPHA:
        raise AdapterError(
            f"lora_alpha of {module!r} is {str(alpha)[:80]}; expected a number of at most {_MAX_ALPHA:g}."
        )
    if not isinstance(config.get("use_rslora", False), bool):
        raise AdapterError(f"use_rslora is {config['use_rslora']!r}; expected true or false.")
    # Rank-stabilised: Kalajdzievski, 2023
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _by_pattern(config: Mapping[str, Any], field: str, module: str, otherwise: Any) -> Any:
    """The value of the first pattern that the end of the module's path matches, as PEFT has it."""
    patterns = config.get(field) or {}
    if not isinstance(patterns, dict):
        raise AdapterError(f"{field} is {patterns!r}; expected an object.")
    for pattern, value in patterns.items():
        _check_pattern(field, pattern)
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return otherwise


def _check_pattern(field: str, pattern: str) -> None:
    shown = f"{field} holds {pattern[:80]!r}, which is"
    repetitions = len(re.findall(r"[*+?{]", pattern.replace("(?:", "(")))
    # Alternatives multiply as well: one after the other, groups of two are 2^n ways to match.
    choices = (1 + pattern.count("|")) ** max(1, pattern.count("("))
    if (
        len(pattern) > _MAX_PATTERN
        or repetitions > _MAX_REPETITIONS
        or choices > _MAX_CHOICES
        or re.search(r"\)[*+{]", pattern)
    ):
        raise AdapterError(
            f"{shown} too complex; expected at most {_MAX_PATTERN} characters, {_MAX_REPETITIONS} "
            f"repetitions, none of them of a group, and {_MAX_CHOICES} ways through its alternatives."
        )
    try:
        re.compile(f"({pattern})")
    except (re.error, OverflowError, RecursionError):
        raise AdapterError(f"{shown} no regular expression.") from None
