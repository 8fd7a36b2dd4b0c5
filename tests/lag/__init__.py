"""A device of which every operation is late, for tests of the order of operations on accelerators.

Its kernels are those of the CPU, run on the threads of streams after random delays. The host can't
access its memory. A freed block is overwritten, and serves the next allocation on its stream. A
result that is read before its time is NaN.

`load` compiles it once and registers it with torch as the device "lag" and the backend "lag".
"""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.utils.cpp_extension as cpp_extension

_HERE = Path(__file__).parent
_SOURCES = ("device.cpp", "operators.cpp", "sparse.cpp", "backend.cpp")
_TOGETHER = "".join(f'#include "{_HERE / source}"\n' for source in _SOURCES)
_FOLDER = _HERE.parents[1] / "build" / "lag" / torch.__version__


class _Module:
    """`torch.lag`, which torch asks about the device."""

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def device_count() -> int:
        return 2

    @staticmethod
    def current_device() -> int:
        return int(torch.accelerator.current_device_index())

    @staticmethod
    def set_device(index: int) -> None:
        torch.accelerator.set_device_index(index)

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        """Do nothing: random numbers come from the CPU's generator."""

    @staticmethod
    def get_rng_state(device: Any = None) -> torch.Tensor:
        return torch.zeros(0, dtype=torch.uint8)

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        """Do nothing, as `manual_seed_all`."""

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


@cache
def load() -> Any:
    """Compile the device, unless that is done, register it, and return its module."""
    _FOLDER.mkdir(parents=True, exist_ok=True)
    # In one go: most of the time goes into reading headers.
    whole = _FOLDER / "whole.cpp"
    if not whole.exists() or whole.read_text() != _TOGETHER:
        whole.write_text(_TOGETHER)
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    with mock.patch.dict(os.environ, PATH=beside):  # for ninja
        module = cpp_extension.load(
            "fddp_lag",
            [str(whole)],
            build_directory=str(_FOLDER),
            extra_cflags=["-O0"],
        )
    torch.utils.rename_privateuse1_backend("lag")
    torch._register_device_module("lag", _Module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)

    def create(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return module.LagBackend(dist.ProcessGroupGloo(store, rank, size, timeout))

    dist.Backend.register_backend("lag", create, devices=["lag"])
    return module
