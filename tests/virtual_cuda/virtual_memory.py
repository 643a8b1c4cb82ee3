"""Loads and stores of interpreted kernels, checked against what the virtual device has allocated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _get_np_dtype
from virtual_driver import VirtualDriver
from virtual_operands import Region


class AccessChecker:
    """Raises IndexError, with ``describe(address)``, for an access outside of live memory or ``regions``."""

    def __init__(
        self, driver: VirtualDriver, describe: Callable[[int], str], regions: Sequence[Region] | None
    ) -> None:
        self._driver = driver
        self._describe = describe
        self._regions = regions

    def check(self, verb: str, pointers: np.ndarray[Any, Any], mask: np.ndarray[Any, Any], size: int) -> None:
        """Check accesses of ``size`` bytes at the pointers whose lane is active."""
        active = pointers[np.broadcast_to(mask, pointers.shape)]
        if active.size == 0:
            return
        self._check_allocations(verb, active, size)
        if self._regions is None:
            return
        inside = np.zeros(active.shape, bool)
        for region in self._regions:
            inside |= region.holds(active, size)
            if inside.all():
                return
        address = int(active[~inside][0])
        raise IndexError(
            f"{verb} of {size} bytes at 0x{address:x}, which belongs to no operand of the launch "
            f"({np.sum(~inside)} lanes); {self._describe(address)}"
        )

    def _check_allocations(self, verb: str, active: np.ndarray[Any, Any], size: int) -> None:
        ranges = self._driver.live_ranges()
        low, high = int(active.min()), int(active.max())
        holder = int(np.searchsorted(ranges[:, 0], np.uint64(low), "right")) - 1
        if holder >= 0 and high + size <= int(ranges[holder, 1]) and not np.any(active % np.uint64(size)):
            return
        holders = np.searchsorted(ranges[:, 0], active, "right") - 1
        inside = (holders >= 0) & (active + np.uint64(size) <= ranges[holders, 1])
        wrong = active[~inside]
        if wrong.size:
            address = int(wrong[0])
            reason = self._driver.explain(address, size) or "outside of every allocation"
            raise IndexError(
                f"{verb} of {size} bytes at {reason} ({wrong.size} lanes); {self._describe(address)}"
            )
        misaligned = active[active % np.uint64(size) != 0]
        if misaligned.size:
            address = int(misaligned[0])
            raise IndexError(f"{verb} of {size} bytes at misaligned 0x{address:x}; {self._describe(address)}")


def _undefined(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """What a masked lane holds where the kernel gives no ``other``: anything, here NaN or -1."""
    if dtype == np.bool_:
        return np.ones(shape, np.bool_)
    count = int(np.prod(shape)) * dtype.itemsize
    return np.full(count, 0xFF, np.uint8).view(dtype).reshape(shape)


@contextmanager
def checking(checker: AccessChecker) -> Iterator[None]:
    """Inside, every load, store and atomic of the interpreter is checked first."""
    names = ("create_masked_load", "create_masked_store", "create_atomic_rmw", "create_atomic_cas")
    load, store, rmw, cas = (getattr(InterpreterBuilder, name) for name in names)

    def item_size(pointers: Any) -> int:
        return int(_get_np_dtype(pointers.get_element_ty()).itemsize)

    def checked_load(self: Any, pointers: Any, mask: Any, other: Any, *rest: Any) -> Any:
        checker.check("load", pointers.data, mask.data, item_size(pointers))
        # Of a scalar load the interpreter forgets an `other` of 0.
        if other is None and pointers.data.size > 1:
            element = pointers.get_element_ty()
            other = TensorHandle(_undefined(pointers.data.shape, _get_np_dtype(element)), element)
        return load(self, pointers, mask, other, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        checker.check("store", pointers.data, mask.data, item_size(pointers))
        return store(self, pointers, value, mask, *rest)

    def checked_rmw(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        checker.check("atomic", pointers.data, mask.data, item_size(pointers))
        return rmw(self, operation, pointers, value, mask, *rest)

    def checked_cas(self: Any, pointers: Any, *rest: Any) -> Any:
        checker.check("atomic", pointers.data, np.ones(pointers.data.shape, bool), item_size(pointers))
        return cas(self, pointers, *rest)

    checked = (checked_load, checked_store, checked_rmw, checked_cas)
    for name, replacement in zip(names, checked, strict=True):
        setattr(InterpreterBuilder, name, replacement)
    try:
        yield
    finally:
        for name, original in zip(names, (load, store, rmw, cas), strict=True):
            setattr(InterpreterBuilder, name, original)
