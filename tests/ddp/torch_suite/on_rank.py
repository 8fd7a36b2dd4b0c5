"""Runs one of torch's tests on one rank."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import inspect
import os
import textwrap
import unittest
from operator import attrgetter
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import rpc
from torch.testing._internal import common_distributed, common_utils

from tests.ddp.torch_suite.edits import EDITS
from tests.ddp.torch_suite.on_cpu import cuda_is_cpu, without_devices

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from tests.ddp.torch_suite.catalogue import TorchTest


_WITH_GROUP = "torch.testing._internal.distributed.distributed_test"


def run(rank: int, world_size: int, test: TorchTest, wrapper: str, shared_file: str) -> None:
    """`test`, with the class `wrapper` as `DistributedDataParallel`.

    `shared_file` is a path that no other test uses, the same on all ranks.
    """
    environment = {
        "BACKEND": "gloo",
        "INIT_METHOD": "file://",  # at which the tests save and load models, too
        "WORLD_SIZE": str(world_size),
        "RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",  # one test loads the state of a hook
    }
    with mock.patch.dict(os.environ, environment):
        module = _module(test.module)
        _use(wrapper, module)
        cases = _case_class(test, module)
        if test.module != _WITH_GROUP:
            dist.destroy_process_group()  # these make their own
            _keep_rpc()
        try:
            for name in _variants(cases, test.name):
                case = cases(name)
                case.rank = rank
                case.file_name = shared_file
                case.meeting = dist.FileStore(f"{shared_file} of {name}", world_size)
                case.barriers = 0
                common_utils.set_rng_seed()
                with cuda_is_cpu(world_size):
                    getattr(case, name)()
        finally:
            torch._dynamo.reset()
            gc.collect()  # wrappers go before their group does
    dist.set_debug_level_from_env()


@functools.cache
def _module(name: str) -> ModuleType:
    """The module, imported while nothing in it is skipped: `left_out.py` says what does not run."""
    with _no_skips():
        module = importlib.import_module(name)
    if name == _WITH_GROUP:
        module.autocast = functools.partial(torch.autocast, "cpu")
        module.GradScaler = functools.partial(torch.amp.GradScaler, "cpu")
    return module


@contextlib.contextmanager
def _no_skips() -> Iterator[None]:
    plain = ["skip_if_no_gpu", "skip_if_small_worldsize", "skip_if_odd_worldsize"]
    with_arguments = [
        (common_distributed, "skip_if_lt_x_gpu"),
        (common_distributed, "nccl_skip_if_lt_x_gpu"),
        (common_distributed, "require_n_gpus_for_nccl_backend"),
        (common_distributed, "requires_nccl"),
        (common_distributed, "requires_nccl_version"),
        (common_utils, "skip_but_pass_in_sandcastle"),
        (common_utils, "skip_but_pass_in_sandcastle_if"),
        (unittest, "skip"),
        (unittest, "skipIf"),
    ]
    with contextlib.ExitStack() as stack:
        for name in plain:
            stack.enter_context(mock.patch.object(common_distributed, name, _unchanged))
        for owner, name in with_arguments:
            stack.enter_context(mock.patch.object(owner, name, return_value=_unchanged))
        yield


def _unchanged(test: Any) -> Any:
    return test


def _use(wrapper: str, module: ModuleType) -> None:
    """Put the class `wrapper` where `module` looks for DistributedDataParallel."""
    owner, name = wrapper.rsplit(".", 1)
    wrapper_class = getattr(importlib.import_module(owner), name)
    _once_without_devices(wrapper_class)
    torch.nn.parallel.DistributedDataParallel = wrapper_class
    if hasattr(module, "DistributedDataParallel"):
        module.DistributedDataParallel = wrapper_class


_once_without_devices = functools.cache(without_devices)


@functools.cache
def _keep_rpc() -> None:
    """Let the process's first RPC agent serve all tests: references do not outlive a second one."""
    init = rpc.init_rpc

    def init_once(*args: Any, **options: Any) -> None:
        if not rpc._is_current_rpc_agent_set():
            init(*args, **options)

    rpc.init_rpc = init_once
    rpc.shutdown = lambda *args, **options: None


def _case_class(test: TorchTest, module: ModuleType) -> type:
    """The class of `test`, made whole as torch's test scripts do."""
    owner = attrgetter(test.owner)(module)
    if test.module == _WITH_GROUP:
        bases = (owner, module.TestDistBackend)
    else:
        fixture = importlib.import_module(
            "torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture"
        )
        bases = (
            owner,
            fixture.TensorPipeRpcAgentTestFixture,
            common_distributed.MultiProcessTestCase,
        )
    members: dict[str, Any] = {"_barrier": _barrier}
    if test.module == _WITH_GROUP:
        members["init_method"] = property(_new_group_file)
    for source in _changed_sources(test, owner):
        members |= _functions(source, module)
    return common_utils.instantiate_parametrized_tests(type(owner.__name__, bases, members))


def _barrier(case: Any, **options: Any) -> None:
    """Of all ranks, also while there is no process group; torch's own polls every 0.1 s."""
    case.barriers += 1
    key = f"barrier {case.barriers}"
    if case.meeting.add(key, 1) == int(case.world_size):
        case.meeting.set(f"end of {key}", "")
    case.meeting.wait([f"end of {key}"])


def _new_group_file(case: Any) -> str:
    """A new rendezvous file; a second group cannot reuse the first one's."""
    return f"file://{case.file_name} {case.barriers}"


def _variants(cases: type, name: str) -> list[str]:
    """The test methods that `name` has become: itself, or one for each choice of parameters."""
    if hasattr(cases, name):
        return [name]
    return [variant for variant in dir(cases) if variant.startswith(f"{name}_")]


def _changed_sources(test: TorchTest, owner: type) -> list[str]:
    """What does not run as `owner` has it: edited functions, and tests in a string literal."""
    edited = {edit.function for edit in EDITS if hasattr(owner, edit.function)}
    sources = [textwrap.dedent(inspect.getsource(getattr(owner, name))) for name in sorted(edited)]
    return [_edited(source) for source in [*sources, test.commented_out] if source]


def _edited(source: str) -> str:
    for edit in EDITS:
        if f"def {edit.function}(" in source:
            assert edit.old in source, f"{edit.function} has no {edit.old!r} to replace"
            source = source.replace(edit.old, edit.new)
    return source


def _functions(source: str, module: ModuleType) -> dict[str, Any]:
    """The functions that `source` defines, as if it stood in `module`."""
    found: dict[str, Any] = {}
    with _no_skips():
        exec(source, dict(vars(module)), found)
    return found
