"""`import fddp` registers the backend "fddp" and does nothing else."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import atexit, logging, os, signal, sys, threading, warnings
import torch, torch.distributed as dist, torch.utils._pytree, optree, numpy

def state():
    return {
        "environment": dict(os.environ),
        "threads": threading.enumerate(), "native threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "signals": [signal.getsignal(n) for n in range(1, signal.NSIG)],
        "handlers": [logging.getLogger(n).handlers for n in (None, "fddp", "torch")],
        "levels": [logging.getLogger(n).level for n in (None, "fddp", "torch")],
        "warnings": [*warnings.filters], "atexit": atexit._ncallbacks(),
        "import hooks": [*sys.meta_path], "path": [*sys.path], "except": sys.excepthook,
        "dtype": torch.get_default_dtype(), "num threads": torch.get_num_threads(),
        "modes": torch.utils._python_dispatch._get_current_dispatch_mode_stack(),
        "grad": torch.is_grad_enabled(), "random": torch.random.get_rng_state().tolist(),
        "class": torch.nn.parallel.DistributedDataParallel.__mro__,
        "module hooks": [*torch.nn.modules.module._global_forward_hooks],
        "groups": dist.is_initialized(), "by device": dict(dist.Backend.default_device_backend_map),
        "extension": "fddp._C" in sys.modules,
    }

before, plugins = state(), {*dist.Backend._plugins}
import fddp
after = state()
for name, value in before.items():
    assert value == after[name], (name, value, after[name])
print({*dist.Backend._plugins} - plugins)
"""


def test_the_backend_is_all_that_an_import_registers() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "FDDP" in run.stdout


def test_torch_alone_does_not_know_the_backend() -> None:
    program = "import torch.distributed as d; print('FDDP' in d.Backend._plugins)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stdout == "False\n", run.stderr
