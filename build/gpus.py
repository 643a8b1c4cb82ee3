"""Which GPU architectures this machine has, asked of the driver."""

from __future__ import annotations

import ctypes

from ..plugins import TARGETS

_SUCCESS = 0
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR


def present_gpus() -> tuple[str, ...]:
    """Targets of this machine's NVIDIA GPUs, each once; empty without a driver or a fitting GPU.

    A GPU without a target of its own is served by compute_80, from compute capability 8.0 on.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count = ctypes.c_int()
    if driver.cuInit(0) != _SUCCESS or driver.cuDeviceGetCount(ctypes.byref(count)) != _SUCCESS:
        return ()
    found: dict[str, None] = {}
    for index in range(count.value):
        numbers = [_attribute(driver, index, which) for which in (_MAJOR, _MINOR)]
        capability = 10 * numbers[0] + numbers[1]
        name = f"sm_{capability}"
        if name in TARGETS:
            found[name] = None
        elif capability >= TARGETS["compute_80"].compute_capability:
            found["compute_80"] = None
    return tuple(found)


def _attribute(driver: ctypes.CDLL, index: int, which: int) -> int:
    device, value = ctypes.c_int(), ctypes.c_int()
    if driver.cuDeviceGet(ctypes.byref(device), index) != _SUCCESS:
        return 0
    if driver.cuDeviceGetAttribute(ctypes.byref(value), which, device) != _SUCCESS:
        return 0
    return value.value
