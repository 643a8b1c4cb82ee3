"""Adapters (LoRA) on CUDA: where those of each product lie in a slot, and the launches that add them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..engines.cuda_layout import aligned
from ..engines.program import AdapterPlace, AdapterSlots, ModuleColumns
from ..plugins import Call
from ..plugins.launch import KernelLaunch
from ..plugins.tactic import LoraPlace
from .modules import starts_of
from .steps import StepList

_BYTES = 2


@dataclass(frozen=True)
class AdaptedStep:
    """What a step with adapters launches in the place of a call's own launches."""

    place: AdapterPlace
    launches: tuple[KernelLaunch, ...]


def adapt(
    steps: StepList, columns: Sequence[Sequence[ModuleColumns]], rank: int, half: str
) -> tuple[AdapterSlots | None, Mapping[int, AdaptedStep]]:
    """Give calls whose products have modules the launches of steps with adapters.

    ``columns``: of each call. ``rank``: of any module, at most; a multiple of 16. Returns the slots
    that adapters are copied to, None where no product takes any, and what was made by the call's number.
    """
    places: dict[int, LoraPlace] = {}
    end = 0
    for number, (call, mine) in enumerate(zip(steps.calls, columns, strict=True)):
        starts = starts_of(mine)
        if not starts or call.adaptable is None:
            continue
        a, b = end, aligned(end + _BYTES * rank * len(starts) * call.adaptable.inputs)
        end = aligned(b + _BYTES * rank * call.adaptable.columns)
        places[number] = LoraPlace(rank, starts, a, b, 0)
    if not places:
        return None, {}
    slots = AdapterSlots.model_validate({"rank": rank, "dtype": half, "slot_bytes": end})
    return slots, {
        number: _adapted(steps, number, replace(one, slot_bytes=end)) for number, one in places.items()
    }


def _adapted(steps: StepList, number: int, place: LoraPlace) -> AdaptedStep:
    call: Call = steps.calls[number]
    assert call.adaptable is not None
    launches, operands = steps.adapt(number, call.adaptable.adapted(place))
    at = AdapterPlace(inputs=call.adaptable.inputs, a=place.a, b=place.b, operands=list(operands))
    return AdaptedStep(at, launches)
