"""fddp has no effect on its process beyond its own calls.

`import fddp` registers the backend "fddp" and does nothing else, and a `GradSync` and a wrapped
module that were closed leave nothing behind but a finalizer that ends threads. This file is also
the program that checks it, in processes of its own: `python -m tests.repo.test_no_effects PART
STORE RANK`.
"""

from __future__ import annotations

import atexit
import copyreg
import ctypes
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from multiprocessing import reduction
from pathlib import Path
from typing import Any

import numpy  # noqa: F401
import optree  # noqa: F401
import pytest
import torch
import torch.distributed as dist
import torch.nn.modules.module
import torch.utils._pytree

LIMIT_S = 20.0  # for threads that end by themselves
BACKENDS = ("backend_list", "_plugins", "backend_capability", "backend_type_map")
CLASSES = (
    torch.Tensor, torch.nn.Parameter, torch.nn.Module, torch.optim.Optimizer,
    torch.autograd.Function, torch.nn.parallel.DistributedDataParallel, dist.ProcessGroup,
)  # fmt: skip


def allocators() -> list[int]:
    """Addresses of torch's CPU allocator and of the allocator of each device type."""
    core = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    of_cpu = core._ZN3c1015GetCPUAllocatorEv
    of_device = core._ZN3c1012GetAllocatorERKNS_10DeviceTypeE
    of_cpu.restype = of_device.restype = ctypes.c_void_p
    return [of_cpu(), *(of_device(ctypes.byref(ctypes.c_int8(n))) for n in range(20))]


def members(thing: Any) -> dict[str, int]:
    return {name: id(value) for name, value in vars(thing).items()}


def globals_of(module: Any) -> dict[str, object]:
    """Hooks for all modules, or for all optimizers."""
    values = {name: value for name, value in vars(module).items() if name.startswith("_global_")}
    return {
        name: [*value] if hasattr(value, "__iter__") else value for name, value in values.items()
    }


def at_exit() -> dict[str, object]:
    """Number of `atexit` handlers, and finalizers that one of them calls."""
    registry: dict[weakref.finalize[..., Any], Any] = weakref.finalize._registry  # type: ignore[attr-defined]
    finalizers = {repr(each): True for each in [*registry] if each.atexit}
    return {"handlers": atexit._ncallbacks(), **finalizers}


def state() -> dict[str, object]:
    """What code of a process may change for all other code of it."""
    return {
        "allocators": allocators(),
        "dispatch: modes": torch.utils._python_dispatch._get_current_dispatch_mode_stack(),
        "dispatch: function modes": torch.overrides._get_current_function_mode_stack(),
        "dispatch: operators": {*map(str, torch._C._dispatch_get_all_op_names())},
        "dispatch: kernels": {*torch.library._impls},
        "dispatch: transforms": torch._C._functorch.peek_interpreter_stack(),
        "hooks: modules": globals_of(torch.nn.modules.module),
        "hooks: optimizers": globals_of(sys.modules["torch.optim.optimizer"]),
        "hooks: saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(False),
        "hooks: exceptions": (sys.excepthook, threading.excepthook, sys.unraisablehook),
        "hooks: tracing": (sys.gettrace(), sys.getprofile(), sys.displayhook, sys.breakpointhook),
        "hooks: imports": (*sys.meta_path, *sys.path_hooks, *sys.path),
        "hooks: pickle": {**copyreg.dispatch_table, **reduction.ForkingPickler._extra_reducers},  # type: ignore[attr-defined]
        "hooks: garbage": (gc.get_threshold(), [*gc.callbacks], gc.get_freeze_count()),
        "at exit": at_exit(),
        **{one.__name__: members(one) for one in CLASSES},
        "torch": members(torch), "torch.distributed": members(dist),
        "pytrees": {*torch.utils._pytree.SUPPORTED_NODES},
        "environment": dict(os.environ),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "native threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "signals": [signal.getsignal(number) for number in range(1, signal.NSIG)],
        "loggers": [
            (logger.level, [*logger.handlers], [*logger.filters], logger.propagate)
            for logger in map(logging.getLogger, (None, "fddp", "torch"))
        ],
        "warnings": [*warnings.filters],
        "modes": (
            torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads(),
            torch.is_grad_enabled(), torch.is_anomaly_enabled(), torch.is_inference_mode_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.autograd.is_multithreading_enabled(),
            sys.getswitchinterval(), sys.getrecursionlimit(),
        ),
        "random numbers": torch.random.get_rng_state().tolist(),
        "groups": dist.is_initialized(), "by device": {**dist.Backend.default_device_backend_map},
    }  # fmt: skip


def changes(before: dict[str, object]) -> dict[str, object]:
    """Return what differs from `before`, once threads that end have ended."""
    until_s = time.perf_counter() + LIMIT_S
    while True:
        gc.collect()
        after = state()
        found = {name: differing(value, after[name]) for name, value in before.items()}
        found = {name: different for name, different in found.items() if different}
        if not found or time.perf_counter() > until_s:
            return found
        time.sleep(0.01)


def differing(value: Any, other: Any) -> object:
    """Return what differs, or None. A number may fall: of threads and files that were about to end
    when it was taken."""
    if isinstance(value, int) and other < value:
        return None
    if isinstance(value, dict) and value != other:
        return {
            n: (value.get(n), other.get(n))
            for n in {*value, *other}
            if value.get(n) != other.get(n)
        }
    return None if value == other else (value, other)


def check_import() -> None:
    state()
    before, backends = state(), [{*getattr(dist.Backend, name)} for name in BACKENDS]
    import fddp

    assert fddp
    assert "fddp._C" not in sys.modules
    assert not changes(before), changes(before)
    for known, name in zip(backends, BACKENDS, strict=True):
        assert {str(new).lower() for new in {*getattr(dist.Backend, name)} - known} == {"fddp"}


def step(module: torch.nn.Module) -> None:
    module(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(module.parameters(), 0.1).step()


def attached(module: torch.nn.Module) -> list[object]:
    """Classes and hooks of a module and of its parameters, and the parameters' memory."""
    parts = [module, *module.parameters()]
    return [
        *((type(one), {n: list(v or ()) for n, v in _hooks(one).items()}) for one in parts),
        [parameter.data_ptr() for parameter in module.parameters()],
    ]


def _hooks(thing: Any) -> dict[str, Any]:
    named = {name: getattr(thing, name, None) for name in dir(thing) if name.endswith("_hooks")}
    return {name: hooks for name, hooks in named.items() if not callable(hooks)}


def check_use(backend: str, store: str, rank: int) -> None:
    """Compare before and after use, on one of two ranks. Torch's own first use comes before, and
    the first thread, whose finalizer stays; see [Note: exits]."""
    import fddp
    from fddp.transport.lifetime import threads

    threads.start_thread(lambda: None, "first", lambda: None).join()

    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=2)
    step(torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2)))
    torch.func.grad(torch.sum)(torch.ones(2))
    grads = {"a": torch.ones(2)}
    for transport in ("shm", "c10d") * 2:
        before = state()
        dist.barrier()
        with fddp.GradSync(grads, transport=transport) as sync:
            sync(grads)
            sync.value_and_grad(lambda params: params["a"].sum())(grads)
        assert not changes(before), (transport, changes(before))
    for _ in range(2):
        module = torch.nn.Linear(2, 2)
        step(module)
        before, own = state(), attached(module)
        dist.barrier()
        step(fddp.DistributedDataParallel(module))
        assert not changes(before), changes(before)
        assert attached(module) == own
    dist.destroy_process_group()


def run(*arguments: str) -> list[tuple[int, str]]:
    """Run this file on as many processes as it has ranks; return exit codes and what they wrote."""
    command, root = [sys.executable, "-m", __name__], Path(__file__).parents[2]
    started = [
        subprocess.Popen(
            [*command, *arguments, str(rank)], cwd=root, stderr=subprocess.PIPE, text=True
        )
        for rank in range(1 if arguments[0] == "import" else 2)
    ]
    return [(one.returncode, text) for one in started for _, text in [one.communicate(timeout=100)]]


def test_an_import_registers_the_backend_and_nothing_else() -> None:
    assert run("import", "") == [(0, "")]


@pytest.mark.parametrize("backend", [pytest.param("gloo", marks=pytest.mark.nightly), "fddp"])
def test_nothing_remains_of_what_was_closed(backend: str, tmp_path: Path) -> None:
    assert run(backend, str(tmp_path / "store")) == [(0, "")] * 2


def test_torch_alone_does_not_know_the_backend() -> None:
    program = "import torch.distributed as d; print('FDDP' in d.Backend._plugins)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.stdout == "False\n", ended.stderr


if __name__ == "__main__":
    part, *where = sys.argv[1:]
    check_import() if part == "import" else check_use(part, where[0], int(where[1]))
