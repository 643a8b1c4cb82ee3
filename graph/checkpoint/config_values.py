"""Values of config.json that no model has: refused by field, before transformers computes with them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeAlias

from castiron.errors import CheckpointError

#: Whether a value is one that the field may have, and which are.
_Rule: TypeAlias = tuple[Callable[[Any], bool], str]

#: Fields of mixtures of experts: how many there are, and how many a token takes.
EXPERT_COUNTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERT_PICKS: Final = ("num_experts_per_tok", "moe_k", "moe_topk")
_MOST: Final = 2**31 - 1
_DTYPE: Final = re.compile(r"(torch\.)?(bfloat16|u?int\d+|float(\d+(_\w+)?)?|half|double)")


def _is_integer(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= _MOST


def _is_number(value: object, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value < high


def _is_number_like(value: object) -> bool:
    return isinstance(value, list | int | float) and not isinstance(value, bool)


def _is_positive(value: object) -> bool:
    return _is_number(value, 0, math.inf) and value != 0


_COUNT: Final[_Rule] = (lambda value: _is_integer(value, 1), f"an integer from 1 to {_MOST}")
_COUNT_OR_NONE: Final[_Rule] = (lambda value: _is_integer(value, 0), "an integer of at least 1, or null")
_TOKEN: Final[_Rule] = (lambda value: _is_integer(value, -1), "a token id, or null")
_EPSILON: Final[_Rule] = (lambda value: _is_number(value, 0, 1), "a number from 0 to below 1")
_POSITIVE: Final[_Rule] = (_is_positive, "a number of more than 0")
_NOT_NEGATIVE: Final[_Rule] = (lambda value: _is_number(value, 0, math.inf), "a number of at least 0")
_FLAG: Final[_Rule] = (lambda value: isinstance(value, bool), "true or false")
_DTYPE_NAME: Final[_Rule] = (
    lambda value: isinstance(value, str) and _DTYPE.fullmatch(value) is not None,
    "the name of a dtype such as 'bfloat16'",
)

#: By the names that fields have in the configurations of different architectures.
_RULES: Final[Mapping[str, _Rule]] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), _COUNT),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), _COUNT),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), _COUNT),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "head_dim"), _COUNT),
    **dict.fromkeys(
        ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), _COUNT
    ),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_hidden_size", "vocab_size"), _COUNT),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"), _COUNT),
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), _COUNT_OR_NONE),
    **dict.fromkeys((*EXPERT_COUNTS, "num_experts_per_tok", "moe_intermediate_size"), _COUNT_OR_NONE),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps"), _EPSILON),
    **dict.fromkeys(("rope_theta", "rotary_emb_base"), _POSITIVE),
    **dict.fromkeys(("bos_token_id", "pad_token_id"), _TOKEN),
    **dict.fromkeys(("dtype", "torch_dtype"), _DTYPE_NAME),
    "tie_word_embeddings": _FLAG,
}
#: Objects with the parameters of rotary positions, of all layers or by type of layer: their numbers divide
#: and scale angles. The first names may also be zero, the second are numbers always.
_ROPE: Final = ("rope_parameters", "rope_scaling")
_ROPE_ZEROS: Final = ("mscale", "mscale_all_dim")
_ROPE_NUMBERS: Final = ("rope_theta", "factor", "original_max_position_embeddings")


def check_values(config: Mapping[str, Any], where: str) -> None:
    """Raise CheckpointError for the first field of a configuration with a value that no model has.

    Null is the architecture's default, and a list has a value for each layer. What transformers refuses by
    itself (texts and fractions in other fields, sizes that do not divide) is left to it.
    """
    for name, value in config.items():
        if name in _ROPE:
            _check_rope(value, f"{where}: {name}")
        elif name in _RULES:
            _check(name, value, _RULES[name], where)


def check_routing(config: Mapping[str, Any], where: str) -> None:
    """Raise CheckpointError where a token of a configuration's mixture cannot take its experts."""
    experts_name, experts = _first(config, EXPERT_COUNTS)
    picks_name, picks = _first(config, EXPERT_PICKS)
    if not experts or picks is None:
        return
    _check(picks_name, picks, _between(1, experts, f"{experts_name}, which is {experts}"), where)
    _, groups = _first(config, ("n_group",))
    if not groups:
        return
    _check("n_group", groups, (lambda n: experts % n == 0, f"a divisor of {experts_name}, {experts}"), where)
    _, kept = _first(config, ("topk_group",))
    if kept is not None:
        _check("topk_group", kept, _between(1, groups, f"n_group, which is {groups}"), where)
        most = kept * experts // groups
        what = f"the experts of {kept} of {groups} groups, which are {most}"
        _check(picks_name, picks, _between(1, most, what), where)


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> tuple[str, int | None]:
    """The first of the fields that is a whole number."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return name, value
    return names[0], None


def _between(low: int, high: int, what: str) -> _Rule:
    return (lambda value: low <= value <= high), f"an integer from {low} to {what}"


def _check(name: str, value: object, rule: _Rule, where: str) -> None:
    allowed, expected = rule
    for one in _single(value):
        if not allowed(one):
            raise CheckpointError(
                f"{where}: {name} is {one!r:.80}; expected {expected}. The file was changed or damaged: "
                f"correct {name}, or download the file again."
            )


def _single(value: object) -> Iterator[object]:
    if isinstance(value, list):
        for one in value:
            yield from _single(one)
    elif isinstance(value, Mapping):  # a dtype for each part of a model
        yield from _single(list(value.values()))
    elif value is not None:
        yield value


def _check_rope(parameters: object, where: str) -> None:
    for name, value in parameters.items() if isinstance(parameters, Mapping) else ():
        if isinstance(value, Mapping):
            _check_rope(value, f"{where}.{name}")
        elif name in _ROPE_NUMBERS or _is_number_like(value):
            _check(name, value, _NOT_NEGATIVE if name in _ROPE_ZEROS else _POSITIVE, where)
