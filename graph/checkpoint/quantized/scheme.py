"""What every family of quantized checkpoints gives: its modules read, and what they say about the cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...quant_plan import CacheFormat
from .module import Module
from .tensor import MadeTensor


@dataclass(frozen=True)
class CacheNumbers:
    """How the checkpoint wants its KV cache: scales by attention module ("...self_attn")."""

    format: CacheFormat = "auto"
    k: Mapping[str, float] = field(default_factory=dict)
    v: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Read:
    """The result of reading a checkpoint.

    Attributes:
        tensors: quantized parameters.
        description: for people: "awq int4, groups of 128".
        cache: of keys and values.
        used: names of stored tensors that ``cache`` or a check took, beside those of ``tensors``.
        notes: sentences for the user.
    """

    tensors: tuple[MadeTensor, ...]
    description: str
    cache: CacheNumbers = CacheNumbers()
    used: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


#: (config object, where it stands, modules by name) -> what it means.
Reader = Callable[[Mapping[str, Any], str, Mapping[str, Module]], Read]
