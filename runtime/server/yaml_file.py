"""Files that people write for the server, in YAML or JSON."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from castiron.errors import EngineError

_MAX_BYTES = 4 << 20


class _Loader(yaml.SafeLoader):
    """YAML's safe types, but a name that a mapping has twice is an error, not the last of the two."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping of a node; raises ValueError for a name that comes twice."""
        # Merged mappings (<<) give names that the mapping's own may replace.
        own = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        _names_once([(str(self.construct_object(key, deep=True)), None) for key in own])
        return super().construct_mapping(node, deep)


def _names_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the name {name[:100]!r} is there twice; expected each name once")
        found[name] = value
    return found


def read_mapping(path: str | Path, what: str) -> dict[str, Any]:
    """The file's content: JSON where its name ends in ``.json``, YAML otherwise.

    Args:
        what: the file is, for messages.

    Raises:
        EngineError: it cannot be read, or holds no mapping of names to values.
    """
    try:
        if Path(path).stat().st_size > _MAX_BYTES:
            raise EngineError(f"{path} ({what}) is larger than {_MAX_BYTES >> 20} MiB")
        text = Path(path).read_text("utf-8")
        if str(path).endswith(".json"):
            found = json.loads(text, object_pairs_hook=_names_once)
        else:
            found = yaml.load(text, _Loader)
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as e:
        raise EngineError(f"{what} cannot be read from {path}: {e}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise EngineError(f"{path} ({what}) is of type {type(found).__name__}; expected names with values")
    for key in found:
        if not isinstance(key, str):
            raise EngineError(f"{path} ({what}) has the name {key!r}, which is no text; expected names")
    return found


def refuse_unknown(found: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """Raise EngineError for a name that is not known, with the nearest that is."""
    names = sorted(known)
    for name in found:
        if name not in names:
            near = difflib.get_close_matches(str(name), names, 1)
            hint = f"did you mean {near[0]}?" if near else f"expected {', '.join(names)}"
            raise EngineError(f"{where} has the unknown name {str(name)[:100]!r}; {hint}")
