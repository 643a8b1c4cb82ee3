"""Memory whose neighbourhood is forbidden: a kernel that leaves its operands dies of it."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any, Final

import numpy as np

_PAGE: Final = mmap.PAGESIZE
#: Forbidden bytes on either side: address space, not memory, and more than a stray row is away.
_GUARD: Final = 64 * _PAGE
_ALIGNMENT: Final = 16
_CANARY: Final = 0xA5
_READ, _WRITE, _NONE = 1, 2, 0

_libc = ctypes.CDLL(None, use_errno=True)


class GuardedBuffer:
    """Bytes that end right before forbidden pages and begin behind some.

    The start is a multiple of 16 bytes, so that up to 15 bytes between end and page stay open, and the first
    page is rarely filled: what is left of both holds a pattern, which ``intact`` checks. ``read_only`` memory
    is filled first and then locked.
    """

    def __init__(self, content: bytes, *, read_only: bool) -> None:
        self.size = len(content)
        room = -(-max(self.size, 1) // _ALIGNMENT) * _ALIGNMENT
        pages = -(-room // _PAGE)
        self._map = mmap.mmap(-1, pages * _PAGE + 2 * _GUARD)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.address = base + _GUARD + pages * _PAGE - room
        self._slack = room - self.size
        self._front = pages * _PAGE - room
        ctypes.memset(self.address - self._front, _CANARY, pages * _PAGE)
        ctypes.memmove(self.address, content, self.size)
        _protect(base, _GUARD, _NONE)
        _protect(base + _GUARD + pages * _PAGE, _GUARD, _NONE)
        if read_only:
            _protect(base + _GUARD, pages * _PAGE, _READ)

    def content(self) -> bytes:
        """The bytes as they are now."""
        return ctypes.string_at(self.address, self.size)

    def intact(self) -> bool:
        """Whether nothing was written before the start or behind the end."""
        around = ctypes.string_at(self.address - self._front, self._front)
        around += ctypes.string_at(self.address + self.size, self._slack)
        return around == bytes([_CANARY]) * len(around)

    def where(self, address: int) -> str:
        """Where a forbidden address lies: on this buffer's read-only bytes or around it; "" if neither."""
        offset = address - self.address
        if 0 <= offset < self.size:
            return f"byte {offset}, which is read-only,"
        if 0 <= offset - self.size < self._slack + _GUARD:
            return f"byte {offset - self.size} behind the end"
        return f"byte {-offset} before the start" if 0 < -offset <= self._front + _GUARD else ""

    def array(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        """A numpy view of the memory."""
        raw: Any = (ctypes.c_char * self.size).from_address(self.address)
        view: np.ndarray[Any, Any] = np.frombuffer(raw, dtype).reshape(shape)
        return view


def _protect(address: int, size: int, access: int) -> None:
    if _libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_int(access)):
        raise OSError(ctypes.get_errno(), "mprotect failed")
