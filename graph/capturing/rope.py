"""Rotary embeddings: the rotation recognised by probing, the frequency table chosen at build time.

Model files carry their own ``apply_rotary_pos_emb``. It is run on random q, k, cos and sin; if the result is
a rotation the vocabulary names, calls become ``castiron::rope``. Else they are traced op by op.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from castiron.errors import UnsupportedModelError

from ..ops import COS_LAYOUTS, ROPE_STYLES
from .patches import Patches
from .probing import real_tensors, same
from .source_hash import check_body

_PREFIXES = ("apply_rotary_pos_emb", "apply_rotary_emb")
_FIRST = ("q", "query", "x", "tensor", "hidden_states", "q_states")
_SECOND = ("k", "key", "k_states")


@dataclass
class RopeReport:
    """What became of each rotary function: name -> style, or why it was traced op by op."""

    functions: dict[str, str] = field(default_factory=dict)


def replace_rotations(patches: Patches, modules: list[ModuleType], report: RopeReport) -> None:
    """Replaces the rotary functions of the modeling ``modules`` by recognising wrappers."""
    for module in modules:
        for name, function in list(vars(module).items()):
            if name.startswith(_PREFIXES) and "vision" not in name and inspect.isfunction(function):
                patches.attribute(module, name, _Rotation(function, report))


def rotate(x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
    """Reference rotation. x [.., T, D] by cos, sin [.., T, R/2]; columns past R pass through."""
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    a, b = (
        (turned[..., :half], turned[..., half:]) if style == "half" else (turned[..., ::2], turned[..., 1::2])
    )
    left, right = a * cos - b * sin, b * cos + a * sin
    if style == "interleaved":
        turned = torch.stack([left, right], -1).flatten(-2)
    else:
        turned = torch.cat([left, right], -1)
    return torch.cat([turned, rest], -1)


class _Rotation:
    """Stands for one rotary function of a modeling file."""

    def __init__(self, function: Callable[..., Any], report: RopeReport) -> None:
        self._function = function
        self._report = report
        self._signature = inspect.signature(function)
        self._known: dict[tuple[object, ...], tuple[str, str] | None] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = self._signature.bind(*args, **kwargs)
        given = bound.arguments
        first = next((given[name] for name in _FIRST if isinstance(given.get(name), Tensor)), None)
        second = next((given[name] for name in _SECOND if isinstance(given.get(name), Tensor)), None)
        cos, sin = given.get("cos"), given.get("sin")
        if first is None or not isinstance(cos, Tensor) or not isinstance(sin, Tensor):
            return self._trace("its arguments are not q, k, cos and sin", args, kwargs)
        if first.ndim != 4 or cos.ndim != 3:
            return self._trace(f"q has {first.ndim} and cos {cos.ndim} dimensions", args, kwargs)
        # The token axis is the symbolic one: [B, H, T, D] or [B, T, H, D].
        heads_first = isinstance(first.shape[1], int)
        found = self._recognise(bound, first, cos, heads_first)
        if found is None:
            return self._trace("no rotation of the vocabulary matches", args, kwargs)
        style, layout = found
        self._report.functions[self._name] = style

        def apply(x: Tensor) -> Tensor:
            x = x if heads_first else x.transpose(1, 2)
            y: Tensor = torch.ops.castiron.rope(x, cos, sin, style, layout)
            return y if heads_first else y.transpose(1, 2)

        return apply(first) if second is None else (apply(first), apply(second))

    @property
    def _name(self) -> str:
        return f"{self._function.__module__.rpartition('.')[2]}.{self._function.__name__}"

    def _trace(self, reason: str, args: Any, kwargs: Any) -> Any:
        self._report.functions[self._name] = f"traced op by op: {reason}"
        return self._function(*args, **kwargs)

    def _recognise(
        self, bound: inspect.BoundArguments, first: Tensor, cos: Tensor, heads_first: bool
    ) -> tuple[str, str] | None:
        extra = {name: value for name, value in bound.arguments.items() if not isinstance(value, Tensor)}
        key = (int(first.shape[-1]), int(cos.shape[-1]), heads_first, str(extra))
        if key not in self._known:
            tensors = {name for name, value in bound.arguments.items() if isinstance(value, Tensor)}
            self._known[key] = self._probe(tensors, extra, key[0], key[1], heads_first)
        return self._known[key]

    def _probe(
        self, tensors: set[str], extra: dict[str, Any], width: int, cos_width: int, heads_first: bool
    ) -> tuple[str, str] | None:
        with real_tensors() as generator:
            q = torch.randn(1, 3, 6, width, generator=generator)
            k = torch.randn(1, 2, 6, width, generator=generator)
            for layout in COS_LAYOUTS:
                half = cos_width if layout == "half" else cos_width // 2
                if 2 * half > width:
                    continue
                angles = torch.randn(1, 6, half, generator=generator)
                cos, sin = (_widen(f(angles), layout) for f in (torch.cos, torch.sin))
                values: dict[str, Any] = {"cos": cos, "sin": sin, **extra}
                values.update(dict.fromkeys(_FIRST, q if heads_first else q.transpose(1, 2)))
                values.update(dict.fromkeys(_SECOND, k if heads_first else k.transpose(1, 2)))
                arguments = {name: values[name] for name in tensors | set(extra) if name in values}
                try:
                    outputs = self._function(**arguments)
                except (RuntimeError, IndexError, TypeError):  # shapes of another layout
                    continue
                outputs = outputs if isinstance(outputs, tuple) else (outputs,)
                outputs = [y if heads_first else y.transpose(1, 2) for y in outputs]
                for style in ROPE_STYLES:
                    table = (torch.cos(angles)[:, None], torch.sin(angles)[:, None])
                    expected = [rotate(x, *table, style) for x in (q, k)[: len(outputs)]]
                    if all(same(y, e) for y, e in zip(outputs, expected, strict=True)):
                        return style, layout
        return None


def _widen(table: Tensor, layout: str) -> Tensor:
    if layout == "repeat_block":
        return torch.cat([table, table], -1)
    return table.repeat_interleave(2, -1) if layout == "repeat_each" else table


def freeze_frequencies(model: nn.Module, max_seq_len: int) -> list[str]:
    """Makes rotary modules use one frequency table for every request, whatever else is in the step.

    ``longrope`` has two tables, and the source model picks one by the longest position of the *batch*; here
    the longest position that an engine of ``max_seq_len`` can see decides. Dynamic NTK recomputes
    frequencies from the current length, which has no meaning for keys already cached: refused. Returns notes
    for the report."""
    from transformers.modeling_rope_utils import dynamic_rope_update

    notes = []
    for name, module in model.named_modules():
        rope_type = getattr(module, "rope_type", None)
        undecorated = getattr(type(module).forward, "__wrapped__", None)
        if rope_type is None or undecorated is None:
            continue
        check_body(dynamic_rope_update)
        kinds = rope_type if isinstance(rope_type, dict) else {None: rope_type}
        for layer_type, kind in kinds.items():
            if "dynamic" in kind:
                raise UnsupportedModelError(
                    f"{name} uses rope type '{kind}': its frequencies change with the length of the running "
                    f"sequence, so keys already in the cache would have to be rotated again. Set "
                    f"rope_parameters to a static type (yarn, linear, llama3, longrope) in config.json if "
                    f"the model allows it"
                )
            if kind == "longrope":
                notes.append(f"{name}: {_freeze_longrope(module, layer_type, max_seq_len)}")
        module.forward = undecorated.__get__(module)
    return notes


def _freeze_longrope(module: Any, layer_type: str | None, max_seq_len: int) -> str:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = module.config.rope_parameters
    original = int((parameters[layer_type] if layer_type else parameters)["original_max_position_embeddings"])
    if max_seq_len <= original:
        return f"longrope's short table (max_seq_len {max_seq_len} <= {original})"
    extra = {"layer_type": layer_type} if layer_type else {}
    table, _ = ROPE_INIT_FUNCTIONS["longrope"](
        module.config, torch.device("cpu"), seq_len=original + 1, **extra
    )
    module._buffers[f"{layer_type}_inv_freq" if layer_type else "inv_freq"] = table
    return f"longrope's long table (max_seq_len {max_seq_len} > {original})"
