"""Which replica gets a request: the one whose cache has most of its beginning, unless that one has much more
to do than another.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: Characters or token ids of a piece of a prompt: near a KV block of 32 tokens.
_PIECE = 128
#: Pieces that are remembered of one replica: 8 million characters, more than a cache of a million tokens.
_REMEMBERED = 65_536


def prefix_keys(body: Mapping[str, Any]) -> list[bytes]:
    """A key for each beginning of the prompt of a request; two prompts share the keys of what they share.

    Adapters, tools and ``cache_salt`` come before the text: requests that differ there share no cache.
    """
    before = [body.get(name) for name in ("model", "cache_salt", "tools", "system")]
    given = body.get("messages") or body.get("input") or body.get("prompt")
    if isinstance(given, list) and given and isinstance(given[0], list):
        given = given[0]
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False, sort_keys=True)
    digest = hashlib.blake2b(json.dumps(before, sort_keys=True).encode(), digest_size=16)
    keys = []
    # A part that does not fill a piece is no key: it says nothing about what follows.
    for begin in range(0, len(text) - _PIECE + 1, _PIECE):
        digest.update(text[begin : begin + _PIECE].encode("utf-8", "surrogatepass"))
        keys.append(digest.digest())
    return keys


@dataclass
class _Replica:
    load: int = 0
    seen: OrderedDict[bytes, None] = field(default_factory=OrderedDict)


class PrefixRouter:
    """Chooses among replicas by what each has been sent and what it is at.

    Args:
        count: of replicas.
        max_imbalance: a replica that has so many more requests than the least busy one gets no more for the
            sake of its cache.
    """

    def __init__(self, count: int, max_imbalance: int = 8) -> None:
        self._replicas = [_Replica() for _ in range(count)]
        self._max_imbalance = max_imbalance
        self._turn = 0

    @property
    def loads(self) -> list[int]:
        """Requests that each replica is at."""
        return [replica.load for replica in self._replicas]

    def choose(self, keys: Sequence[bytes], available: Sequence[int]) -> int:
        """The index of the replica for a prompt with these keys, among those ``available``; it counts as busy
        with the request until ``done``.
        """
        least = min(self._replicas[i].load for i in available)
        near = [i for i in available if self._replicas[i].load - least < self._max_imbalance]
        matches = {i: self._match(i, keys) for i in near}
        most = max(matches.values())
        best = [i for i in near if matches[i] == most]
        lightest = min(self._replicas[i].load for i in best)
        best = [i for i in best if self._replicas[i].load == lightest]
        self._turn += 1  # equals take turns
        chosen = best[self._turn % len(best)]
        self._note(chosen, keys)
        return chosen

    def done(self, index: int) -> None:
        """A request of that replica has ended."""
        self._replicas[index].load -= 1

    def forget(self, index: int) -> None:
        """The replica was started again, with an empty cache."""
        self._replicas[index].seen.clear()

    def _match(self, index: int, keys: Sequence[bytes]) -> int:
        seen = self._replicas[index].seen
        for count, key in enumerate(keys):
            if key not in seen:
                return count
        return len(keys)

    def _note(self, index: int, keys: Sequence[bytes]) -> None:
        replica = self._replicas[index]
        replica.load += 1
        for key in keys:
            replica.seen[key] = None
            replica.seen.move_to_end(key)
        while len(replica.seen) > _REMEMBERED:
            replica.seen.popitem(last=False)
