"""The adapters of one engine: names, what of them is in memory, and which requests use it."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..request_errors import AdapterError, AdapterNotFoundError, QueueFullError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Pair = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], float]

_MAX_NAME = 256
#: Names cost next to nothing, but a client that may load adapters must not fill the memory with them.
_MAX_NAMES = 4096


class AdapterCore(Protocol):
    """What the core does with adapters."""

    def add_adapter(self, modules: Mapping[str, Pair]) -> int:
        """Make an adapter ready to run; raises ValueError where it does not fit."""

    def remove_adapter(self, adapter: int) -> None:
        """No request can name it any more; its memory goes with the last that did."""


@dataclass(eq=False)
class AdapterUse:
    """An adapter that is in memory; ``id`` is the core's. Kept there while ``users`` is not 0."""

    name: str
    id: int
    users: int = 0
    last_use: int = 0
    #: Unloaded or replaced: it goes with its last user.
    leaving: bool = False


class Adapters:
    """Loads adapters, gives them to requests, and drops the least recently used one when room is short.

    Thread-safe. A name stays known when its adapter is dropped from memory: the next request reads the files
    again.

    Args:
        sizes: (inputs, outputs) of the modules that adapters can add to, by their paths in the source model.
        max_rank: of any module of an adapter.
        max_in_memory: adapters in memory at a time, those of running requests among them.
    """

    def __init__(
        self, core: AdapterCore, sizes: Mapping[str, tuple[int, int]], *, max_rank: int, max_in_memory: int
    ) -> None:
        self._core = core
        self._sizes = sizes
        self._max_rank = max_rank
        self._max_in_memory = max_in_memory
        # One adapter is read at a time, which may take long; the other lock is held for moments only, so that
        # requests for what is in memory never wait for files.
        self._loading = threading.Lock()
        self._lock = threading.Lock()
        self._paths: dict[str, str] = {}  # replaced, not changed: read without a lock
        self._loaded: dict[str, AdapterUse] = {}
        self._leaving: list[AdapterUse] = []
        self._clock = itertools.count(1)

    @property
    def paths(self) -> Mapping[str, str]:
        """The folders of the known adapters by their names."""
        return self._paths

    @property
    def in_memory(self) -> int:
        """Adapters in memory."""
        with self._lock:
            return self._in_memory()

    def load(self, name: str, path: str | os.PathLike[str]) -> None:
        """Read an adapter and make it known by a name.

        Raises:
            AdapterError: the name is taken, or the adapter cannot be used; the text says why.
            QueueFullError: all places in memory are held by running requests.
        """
        # Names go into headers, logs and metrics: no line breaks, no control characters.
        if not isinstance(name, str) or not 1 <= len(name) <= _MAX_NAME or not name.isprintable():
            raise AdapterError(
                f"the adapter's name is {str(name)[:80]!r}; expected 1 to {_MAX_NAME} printable characters"
            )
        if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
            raise AdapterError(f"the folder of the adapter {name!r} is {path!r}; expected a path")
        with self._loading:
            if name in self._paths:
                raise AdapterError(
                    f"the adapter {name!r} is loaded already, from {self._paths[name]}; unload it first"
                )
            if len(self._paths) >= _MAX_NAMES:
                raise AdapterError(f"{len(self._paths)} adapters are known already, as many as there may be")
            self._bring(name, os.fspath(path), new=True)

    def unload(self, name: str) -> None:
        """Forget an adapter. Requests that use it go on; its memory goes with the last of them.

        Raises:
            AdapterNotFoundError: there is none of this name.
        """
        with self._lock:
            if name not in self._paths:
                raise self._unknown(name)
            self._paths = {other: path for other, path in self._paths.items() if other != name}
            if (loaded := self._loaded.get(name)) is not None:
                self._drop(loaded)

    def acquire(self, name: str) -> AdapterUse:
        """An adapter for a request, in memory until ``release``; read again if it had been dropped.

        Takes no time while somebody else holds the adapter, or where the name is unknown.

        Raises:
            AdapterNotFoundError: there is none of this name.
            AdapterError: it cannot be read any more.
            QueueFullError: all places in memory are held by running requests.
        """
        found = self._take(name)
        if found is not None:
            return found
        if name not in self._paths:
            raise self._unknown(name)
        with self._loading:
            found = self._take(name)  # somebody else may have brought it
            if found is not None:
                return found
            folder = self._paths.get(name)
            if folder is None:
                raise self._unknown(name)
            return self._bring(name, folder, users=1)

    def release(self, use: AdapterUse) -> None:
        """The request has ended."""
        with self._lock:
            use.users -= 1
            if use.leaving and use.users == 0:
                self._leaving.remove(use)

    def _take(self, name: str) -> AdapterUse | None:
        with self._lock:
            found = self._loaded.get(name)
            if found is not None:
                found.users += 1
                found.last_use = next(self._clock)
            return found

    def _bring(self, name: str, folder: str, *, users: int = 0, new: bool = False) -> AdapterUse:
        """Read an adapter into memory; the caller holds ``_loading``."""
        from .peft_files import read_adapter  # a start without adapters does not wait for it

        modules = read_adapter(folder, self._sizes, self._max_rank)
        with self._lock:
            self._make_room()
        try:
            adapter = self._core.add_adapter({m: (one.a, one.b, one.scale) for m, one in modules.items()})
        except ValueError as e:
            raise AdapterError(f"the adapter in {folder} cannot be used: {e}") from None
        with self._lock:
            if new:
                self._paths = {**self._paths, name: folder}
            elif name not in self._paths:  # unloaded meanwhile
                self._core.remove_adapter(adapter)
                raise self._unknown(name)
            made = AdapterUse(name, adapter, users, next(self._clock))
            self._loaded[name] = made
            return made

    def _make_room(self) -> None:
        while self._in_memory() >= self._max_in_memory:
            idle = [one for one in self._loaded.values() if not one.users]
            if not idle:
                raise QueueFullError(
                    f"all {self._max_in_memory} adapters in memory are in use by requests; try again later, "
                    "or raise --max-cpu-loras",
                    retry_after=1,
                )
            self._drop(min(idle, key=lambda one: one.last_use))

    def _drop(self, one: AdapterUse) -> None:
        del self._loaded[one.name]
        self._core.remove_adapter(one.id)
        if one.users:
            one.leaving = True
            self._leaving.append(one)

    def _in_memory(self) -> int:
        return len(self._loaded) + len(self._leaving)

    def _unknown(self, name: str) -> AdapterNotFoundError:
        known = ", ".join(sorted(self._paths)[:20]) or "none"
        return AdapterNotFoundError(
            f"there is no adapter {str(name)[:200]!r}; loaded are: {known}", param="lora"
        )
