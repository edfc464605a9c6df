"""Whether a GPU that the configuration names is there, asked of its driver.

Loads no torch. A wheel of torch that was built without GPUs shows only when a worker starts.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from offbeat.errors import ConfigError

_AMD = Path("/dev/kfd")
"""Where AMD's driver is, whose GPUs torch calls cuda as well."""


def check_device(device: str) -> None:
    """Refuse ``cuda`` and ``cuda:<index>`` where there is no such GPU.

    Raises:
        ConfigError: says how many there are.
    """
    if not device.startswith("cuda") or _AMD.exists():
        return
    index, found = int(device.partition(":")[2] or 0), _nvidia_gpus()
    if index >= found:
        there = "no GPU that this process can use" if found == 0 else f"{found}, counted from 0"
        raise ConfigError(
            f"model.device: {device} is not there: the NVIDIA driver knows {there} "
            "(CUDA_VISIBLE_DEVICES may hide some); set model.device to auto or cpu"
        )


def _nvidia_gpus() -> int:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value
