"""The arguments of ``generate`` and ``chat``: prompts in any form, parameters by their names elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import fields, replace
from typing import Any

from castiron.errors import RequestError

from .param_values import as_integer
from .request_check import as_lists
from .request_errors import ParameterError, called
from .sampling_params import MAX_N, SamplingParams

_FIELDS = frozenset(f.name for f in fields(SamplingParams))
#: TensorRT-LLM's names for what SamplingParams calls otherwise.
_ALIASES = {"max_new_tokens": "max_tokens", "random_seed": "seed", "num_return_sequences": "n"}


def merged_params(sampling_params: Any, options: dict[str, Any]) -> SamplingParams:
    """SamplingParams with the keyword arguments of ``generate`` in their place."""
    if sampling_params is not None and not isinstance(sampling_params, SamplingParams):
        raise ParameterError(
            f"sampling_params is of type {type(sampling_params).__name__}; expected SamplingParams",
            param="sampling_params",
        )
    base = sampling_params or SamplingParams()
    given: dict[str, Any] = {}
    names = {field: name for name, field in _ALIASES.items() if name in options}
    if "num_beams" in options:
        names |= dict.fromkeys(("best_of", "use_beam_search"), "num_beams")
    for name, value in _without_num_beams(options).items():
        field = _ALIASES.get(name, name)
        if field not in _FIELDS and field != "end_id":
            raise ParameterError(
                f"generate has no option {name!r}; it knows "
                f"{', '.join(sorted(_FIELDS | _ALIASES.keys()))}, num_beams, end_id and lora_request",
                param=name,
            )
        if field in given:
            raise ParameterError(
                f"{name} says the same as {field}, which is also given; give one", param=name
            )
        given[field] = value
    end_id = given.pop("end_id", None)
    if end_id is not None:
        given["ignore_eos"] = True
        if as_integer("end_id", end_id, -1, 2**31 - 1) != -1:
            given["stop_token_ids"] = (*given.get("stop_token_ids", base.stop_token_ids), end_id)
    sampling = given.get("top_k", 1) not in (0, 1, -1) or given.get("top_p", 1.0) != 1.0
    if sampling_params is None and "temperature" not in given and sampling:
        # Nobody narrows the choice of tokens in order to get no choice; TensorRT-LLM's temperature is 1
        # there.
        given["temperature"] = 1.0
    with called(names):
        return replace(base, **given)


def params_of_prompts(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, options: dict[str, Any], count: int
) -> list[SamplingParams]:
    """One SamplingParams for each of ``count`` prompts: one for all, or a list of as many."""
    if not isinstance(sampling_params, (list, tuple)):
        return [merged_params(sampling_params, options)] * count
    if len(sampling_params) != count:
        raise ParameterError(
            f"{len(sampling_params)} sampling_params for {count} prompts; give one for all, or one for each",
            param="sampling_params",
        )
    return [merged_params(one, options) for one in sampling_params]


def _without_num_beams(options: dict[str, Any]) -> dict[str, Any]:
    """``num_beams`` as SamplingParams says it; one beam is no search, as in transformers."""
    if "num_beams" not in options:
        return options
    rest = {name: value for name, value in options.items() if name != "num_beams"}
    for name in ("best_of", "use_beam_search"):
        if name in rest:
            raise ParameterError(f"{name} says the same as num_beams; give one", param=name)
    beams = as_integer("num_beams", options["num_beams"], 1, MAX_N)
    return rest if beams == 1 else {**rest, "best_of": beams, "use_beam_search": True}


def prompt_rows(input_ids: Any, prompts: str | Sequence[str] | None) -> tuple[list[Any], list[str | None]]:
    """Prompts as (ids or None, text or None) side by side."""
    if (input_ids is None) == (prompts is None):
        found = "neither" if prompts is None else "both"
        raise RequestError(f"{found} of input_ids and prompts given; give token ids or text")
    if prompts is not None:
        # The keys of a mapping are its names for texts, and a set gives them in any order.
        if isinstance(prompts, (bytes, Mapping, Set)) or not isinstance(prompts, Iterable):
            raise RequestError(
                f"prompts is of type {type(prompts).__name__}; expected a text or a list of texts"
            )
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        for text in texts:
            if not isinstance(text, str):
                raise RequestError(
                    f"a prompt is of type {type(text).__name__}; expected text (ids go into input_ids)"
                )
        return [None] * len(texts), list(texts)
    if getattr(input_ids, "ndim", 0) == 1 and not isinstance(input_ids, memoryview):
        return [input_ids], [None]  # one prompt, which may be too long to be worth a list
    input_ids = as_lists("input_ids", input_ids)
    if not isinstance(input_ids, (list, tuple, range)):
        raise RequestError(
            f"input_ids is of type {type(input_ids).__name__}; expected a list of token ids, or a list of "
            "such lists"
        )
    ids_alone = set(map(type, input_ids)) <= {int}  # of millions this is told sooner
    rows = list(input_ids) if not ids_alone and any(map(_is_prompt, input_ids)) else [input_ids]
    return rows, [None] * len(rows)


def _is_prompt(item: Any) -> bool:
    """Whether it is several ids (or a text), not one: a scalar array is one."""
    if hasattr(item, "ndim"):
        return bool(item.ndim)
    return hasattr(item, "__len__") or hasattr(item, "tolist")
