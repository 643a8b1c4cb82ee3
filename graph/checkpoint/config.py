"""config.json and generation_config.json, and the fields that come in several spellings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from castiron.errors import CheckpointError

from .config_values import check_values


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object; ``CheckpointError`` names the file otherwise."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: not found; expected a Hugging Face checkpoint folder.") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not valid JSON ({error}). Download it again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {type(value).__name__}, expected a JSON object.")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """The model's config."""
    config = read_json_object(folder / "config.json")
    if config.get("format") == "castiron-engine":
        raise CheckpointError(
            f"{folder}: is an engine that castiron built; expected the checkpoint that it was built from. "
            f"castiron inspect {folder} names it."
        )
    if not isinstance(config.get("model_type"), str):
        raise CheckpointError(
            f"{folder / 'config.json'}: 'model_type' is {config.get('model_type')!r}, expected the name of a "
            "transformers architecture such as 'llama'."
        )
    check_values(config, str(folder / "config.json"))
    return config


def read_generation_config(folder: Path) -> dict[str, Any]:
    """generation_config.json, or an empty dict: the file is optional."""
    path = folder / "generation_config.json"
    return read_json_object(path) if path.is_file() else {}


def other_model_code(config: Mapping[str, Any], used: str) -> list[str]:
    """Sentences about model code that the config names and that is not transformers' class ``used``.

    Most checkpoints with code of their own are of models that transformers has learnt since; a model that
    was changed is caught where its tensors or fields differ, and nothing else would tell.
    """
    custom, named = config.get("auto_map"), config.get("architectures")
    if isinstance(custom, dict) and isinstance(code := custom.get("AutoModelForCausalLM"), str):
        return [f"config.json names model code of its own ({code}), which is not run: built as {used}"]
    if isinstance(named, list) and named and used not in named:
        return [f"config.json names the architecture {named[0]!r}: built as {used}, by its model_type"]
    return []


def eos_token_ids(
    config: Mapping[str, Any], generation_config: Mapping[str, Any]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Every token that ends a sequence, ascending and unique, and sentences about ids left out.

    ``eos_token_id`` may stand in the config, in its text part and in the generation config, as a number or as
    a list; models keep end-of-turn tokens in one and end-of-text in the other, so the union counts. An id
    that the vocabulary does not have can never be generated: it is left out and told.
    """
    text = config.get("text_config")
    places: list[tuple[str, Mapping[str, Any]]] = [("config.json", config)]
    if isinstance(text, Mapping):
        places.append(("config.json: text_config", text))
    places.append(("generation_config.json", generation_config))
    vocab_size = config.get("vocab_size") or (text or {}).get("vocab_size")
    found: set[int] = set()
    notes: list[str] = []
    for place, values in places:
        value = values.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if token is None:
                continue
            if not isinstance(token, int) or isinstance(token, bool):
                raise CheckpointError(f"{place}: eos_token_id holds {token!r}; expected token ids.")
            if token == -1:  # written by some tools for "none"
                continue
            if token < 0 or (isinstance(vocab_size, int) and token >= vocab_size):
                notes.append(
                    f"{place}: eos_token_id {token} is outside the vocabulary of {vocab_size}; ignored"
                )
                continue
            found.add(token)
    return tuple(sorted(found)), tuple(dict.fromkeys(notes))
