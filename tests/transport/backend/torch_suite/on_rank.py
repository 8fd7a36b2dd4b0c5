"""Runs one of torch's tests on one rank, with one backend."""

from __future__ import annotations

import functools
import gc
import importlib
import os
import unittest
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal import common_distributed, common_utils

_MODULE = "torch.testing._internal.distributed.distributed_test"


def run(rank: int, world_size: int, name: str, backend: str, folder: str) -> str:
    """Run a test in a default group of its own.

    Args:
        name: of the test method.
        backend: of the groups.
        folder: empty, the same on all ranks, and used by no other test.

    Returns:
        "passed", or the reason for which torch skips the test.
    """
    environment = {
        # Tests choose by this name whether they run. The backend is set below.
        "BACKEND": "gloo",
        "INIT_METHOD": f"file://{folder}/second",
        "WORLD_SIZE": str(world_size),
        "RANK": str(rank),
        "TEMP_DIR": folder,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
    }
    for subfolder in ("barrier", "test_dir"):
        (Path(folder) / subfolder).mkdir(exist_ok=True)
    dist.destroy_process_group()
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(dist, "monitored_barrier", _monitored_barrier),
    ):
        module = _module()
        module.BACKEND, module.INIT_METHOD = backend, environment["INIT_METHOD"]
        cases = _case_class(module)
        variants = [n for n in dir(cases) if n == name or n.startswith(f"{name}_")]
        if name in variants:
            variants = [name]
        outcome = "passed"
        for number, variant in enumerate(variants):
            outcome = _run_variant(cases(variant), rank, world_size, backend, folder, number)
            torch._dynamo.reset()
            gc.collect()
    dist.set_debug_level_from_env()
    return outcome


def _run_variant(
    case: Any, rank: int, world_size: int, backend: str, folder: str, number: int
) -> str:
    name = case._testMethodName
    case.rank = rank
    case.file_name = str(Path(folder) / f"group {number}")
    case.meeting = dist.FileStore(str(Path(folder) / f"meeting {number}"), world_size)
    case.barriers = 0
    common_utils.set_rng_seed()
    timeout_s = common_distributed.__dict__.get("CUSTOM_PG_TIMEOUT", {}).get(name, 100)
    dist.init_process_group(
        backend,
        init_method=f"file://{case.file_name}",
        world_size=world_size,
        rank=rank,
        timeout=timedelta(seconds=timeout_s),
    )
    case._barrier()
    outcome = "passed"
    try:
        getattr(case, name)()
    except unittest.SkipTest as skip:
        outcome = str(skip) or "skipped"
    except SystemExit as ended:
        skips = common_distributed.TEST_SKIPS.values()
        reasons = [skip.message for skip in skips if skip.exit_code == ended.code]
        if not reasons and ended.code:
            raise
        outcome = reasons[0] if reasons else "passed"
    if outcome == "passed":
        case._barrier()
    if dist.is_initialized():
        dist.destroy_process_group()
    return outcome


@functools.cache
def _module() -> Any:
    """The module, imported while no test asks for 8 ranks; 4 are enough for all."""
    with mock.patch.object(common_distributed, "skip_if_small_worldsize", lambda test: test):
        return importlib.import_module(_MODULE)


@functools.cache
def _case_class(module: Any) -> type:
    owner = module.DistributedTest._DistTestBase
    members = {"_barrier": _barrier}
    cases = type(owner.__name__, (module.TestDistBackend, owner), members)
    return common_utils.instantiate_parametrized_tests(cases)


def _monitored_barrier(
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | float | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """torch's function refuses every backend but gloo; the method of groups does not."""
    found = dist.group.WORLD if group is None else group
    if found is None or found == dist.GroupMember.NON_GROUP_MEMBER:
        return
    within = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout or 100)
    found.monitored_barrier(within, wait_all_ranks=wait_all_ranks)


def _barrier(case: Any, wait_for: int | None = None, timeout: float = 60.0) -> None:
    """Of all ranks, without their process group; torch's own polls every 0.1 s."""
    case.barriers += 1
    key = f"barrier {case.barriers}"
    if case.meeting.add(key, 1) == (wait_for or int(case.world_size)):
        case.meeting.set(f"end of {key}", "")
    case.meeting.wait([f"end of {key}"], timedelta(seconds=timeout))
