"""torch.export of the prepared model behind the graph's own inputs and outputs."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.nn import functional

from castiron.errors import CastironError, UnsupportedModelError

from ..custom import ModuleTakeover
from .activations import replace_activations
from .attention import replace_mask_factories
from .experts import replace_experts
from .norms import replace_norms
from .overrides import override_forwards
from .patches import Patches
from .rope import RopeReport, freeze_frequencies, replace_rotations
from .takeover import take_over

#: Most tokens a step may have; a bound for the symbolic dimension, not a buffer size.
_MAX_TOKENS = 1 << 20


class PackedCausalLM(nn.Module):
    """The model with packed inputs: token_ids [T], positions [T], logit_rows [N] -> logits [N, vocab]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        accepted = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._takes_rows = "logits_to_keep" in accepted

    def forward(self, token_ids: Tensor, positions: Tensor, logit_rows: Tensor) -> Tensor:
        """Runs the model on a batch of one sequence made of all tokens."""
        arguments: dict[str, Any] = {
            "input_ids": token_ids.unsqueeze(0),
            "use_cache": False,
            "return_dict": True,
        }
        if self._takes_positions:
            arguments["position_ids"] = positions.unsqueeze(0)
        if self._takes_rows:
            arguments["logits_to_keep"] = logit_rows
        logits: Tensor = self.model(**arguments).logits.squeeze(0)
        return logits if self._takes_rows else logits[logit_rows]


@dataclass(frozen=True)
class Traced:
    """The exported program, with what became of the parts that were recognised or left as they are."""

    program: ExportedProgram
    replaced: dict[str, str]
    notes: list[str]


def trace(
    model: nn.Module, mode: FakeTensorMode, max_seq_len: int, takeovers: Sequence[ModuleTakeover] = ()
) -> Traced:
    """Exports the fake ``model``, with plugins' ops in place of the modules they take over.

    Raises UnsupportedModelError with the reason and, if known, the module.
    """
    name = type(model).__name__
    notes = freeze_frequencies(model, max_seq_len)
    taken = take_over(model, takeovers)
    replaced = replace_norms(model) | replace_activations(model) | override_forwards(model)
    replaced |= replace_experts(model)
    rotations = RopeReport()
    wrapper = PackedCausalLM(model).eval()
    with mode:
        example = (torch.ones(24, dtype=torch.long), torch.arange(24), torch.zeros(3, dtype=torch.long))
    tokens, rows = Dim("T", min=1, max=_MAX_TOKENS), Dim("N", min=1, max=_MAX_TOKENS)
    modules = modeling_modules(model)
    try:
        with torch.no_grad(), Patches() as patches:
            replace_mask_factories(patches, modules)
            replace_rotations(patches, modules, rotations)
            # The same meaning as aten::linear, whose shape function costs most of the time of a large trace.
            patches.attribute(functional, "linear", torch.ops.castiron.linear)
            program = torch.export.export(
                wrapper, example, dynamic_shapes=({0: tokens}, {0: tokens}, {0: rows}), strict=False
            )
    except CastironError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"{name} cannot be traced: {type(error).__name__}: {_first_lines(error)}"
        ) from error
    return Traced(program, replaced | taken | rotations.functions, notes)


def modeling_modules(model: nn.Module) -> list[ModuleType]:
    """The Python modules that define the model's own classes (transformers' or the checkpoint's code)."""
    names = {type(module).__module__ for module in model.modules()}
    return [sys.modules[name] for name in sorted(names) if name.startswith("transformers")]


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3])[:500]
