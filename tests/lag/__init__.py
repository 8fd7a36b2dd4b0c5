"""A device of which every operation is late, for tests of the order of operations on accelerators.

Its kernels are those of the CPU, run on the threads of streams after random delays. The host can't
access its memory. A freed block is overwritten, and serves the next allocation on its stream. A
result that is read before its time is NaN.

`build` compiles it, `load` registers it with torch as the device "lag", with the backend "lag", one
without averages, reduce-scatter and gathers in place ("basic"), one that takes averages for sums
("sums"), and a double of "nccl", all of them over gloo.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from functools import cache, partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.cpp_extension as cpp_extension
from torch.distributed import distributed_c10d

_HERE = Path(__file__).parent
_SOURCES = ("device.cpp", "graph.cpp", "operators.cpp", "sparse.cpp", "backend.cpp")
_LIBRARIES = ("c10", "torch", "torch_cpu", "torch_python")
_NAME = "fddp_lag"
BUILD = _HERE.parents[1] / "build" / "lag"


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
    def is_current_stream_capturing() -> bool:
        return bool(load().is_current_stream_capturing())

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


def library() -> Path:
    """Return the path of the compiled device, which names what it was compiled for and from."""
    texts = [path.read_bytes() for path in sorted({*_HERE.glob("*.cpp"), *_HERE.glob("*.h")})]
    digest = hashlib.sha256(b"".join(texts)).hexdigest()[:16]
    return BUILD / f"{torch.__version__}-{sys.implementation.cache_tag}-{digest}.so"


def build() -> Path:
    """Compile the device, unless that is done, and return its path. Takes half a minute."""
    target = library()
    if target.exists():
        return target
    BUILD.mkdir(parents=True, exist_ok=True)
    # The system releases the lock of a process that is killed.
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            for left in BUILD.glob("unfinished-*"):
                shutil.rmtree(left)
            with tempfile.TemporaryDirectory(dir=BUILD, prefix="unfinished-") as folder:
                os.replace(_compiled(Path(folder)), target)
    return target


def _compiled(folder: Path) -> Path:
    # In one go: most of the time goes into reading headers.
    whole, built = folder / "whole.cpp", folder / f"{_NAME}.so"
    whole.write_text("".join(f'#include "{_HERE / source}"\n' for source in _SOURCES))
    headers = [sysconfig.get_path("include"), *cpp_extension.include_paths()]
    command = [
        *("c++", "-std=c++20", "-O1", "-fPIC", "-shared", f"-DTORCH_EXTENSION_NAME={_NAME}"),
        *(f"-isystem{folder}" for folder in headers),
        *(str(whole), "-o", str(built)),
        *(f"-L{folder}" for folder in cpp_extension.library_paths()),
        *(f"-l{name}" for name in _LIBRARIES),
    ]
    subprocess.run(command, check=True)
    return built


@cache
def load() -> Any:
    """Register the compiled device, and return its module."""
    spec = spec_from_file_location(_NAME, build())
    assert spec is not None
    assert spec.loader is not None
    module: Any = module_from_spec(spec)
    spec.loader.exec_module(module)
    untyped: Any = torch
    untyped.utils.rename_privateuse1_backend("lag")
    untyped._register_device_module("lag", _Module)
    untyped.utils.generate_methods_for_privateuse1_backend(for_storage=True)

    def create(kind: str, store: Any, rank: int, size: int, timeout: Any) -> Any:
        return module.LagBackend(dist.ProcessGroupGloo(store, rank, size, timeout), kind)

    for kind in ("lag", "basic", "sums"):
        dist.Backend.register_backend(kind, partial(create, kind), devices=["lag"])
    module.set_connect(dist.ProcessGroupGloo)
    c10d: Any = distributed_c10d
    c10d._NCCL_AVAILABLE = True
    c10d.ProcessGroupNCCL = module.ProcessGroupNCCL
    return module
