"""Groups with the backend "fddp": of all ranks, of some, and where memory is not shared."""

from __future__ import annotations

import json
import os
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh

import fddp
from fddp.transport.backend import BackendChoice, backend_choice
from fddp.transport.backend.registration import register
from tests.support.backends import as_default, new_fddp_group
from tests.support.process_resources import Resources, growth, resources
from tests.support.programs import torchrun
from tests.support.ranks import RankPool, run_fresh, split_into_hosts


def _choice(rank: int, world_size: int) -> tuple[BackendChoice, BackendChoice]:
    group = new_fddp_group()
    with split_into_hosts([[0], [1, 2]]):
        divided = new_fddp_group()
    for one in (group, divided):
        total = torch.ones(3)
        dist.all_reduce(total, group=one)
        assert total[0] == world_size
    choices = backend_choice(group), backend_choice(divided)
    with pytest.raises(ValueError, match="does not have the backend"):
        backend_choice()
    dist.destroy_process_group(group)
    dist.destroy_process_group(divided)
    return choices


def test_gloo_where_ranks_do_not_share_memory(ranks: RankPool) -> None:
    for shared, divided in ranks.run(3, _choice):
        assert shared == BackendChoice("shm", "all 3 ranks share the memory of a host")
        assert divided.name == "gloo"
        assert divided.reason == "the ranks are on 2 hosts or parts of them (0, 1-2)"


def _over_two_hosts(rank: int, world_size: int, folder: str) -> None:
    """A default group over gloo, and the library itself on it."""
    with split_into_hosts([[0, 1], [2, 3]]):
        as_default(rank, world_size, folder, _on_two_hosts)


def _on_two_hosts(rank: int, world_size: int) -> None:
    assert backend_choice().name == "gloo"
    gradients = {"w": torch.full((100_000,), float(rank)), "b": torch.ones(3)}
    for algorithm in ("all_reduce", "hierarchical"):
        topology = fddp.Topology(host=2, local=2)
        with fddp.GradSync(gradients, mesh=topology, algorithm=algorithm) as sync:
            means = sync(gradients)
        assert bool(means["w"].eq(1.5).all())
    within = dist.new_group([2, 3])
    if rank >= 2:
        assert backend_choice(within).name == "shm"
        total = torch.ones(3)
        dist.all_reduce(total, group=within)
        assert total[0] == 2.0
    world = dist.group.WORLD
    assert world is not None
    part = world.split_group([0, 3] if rank in (0, 3) else [1, 2])
    total = torch.full((10,), float(rank))
    part.allreduce([total]).wait()
    assert total[0] == 3.0
    assert part._get_backend(torch.device("cpu")).name() == "gloo"


def test_a_default_group_over_two_hosts(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(4, _over_two_hosts, str(tmp_path))


def _parts(rank: int, world_size: int) -> None:
    total = torch.ones(1)
    pairs = [dist.new_group(pair, backend="fddp") for pair in ([0, 1], [2, 3], [3, 0])]
    for pair, group in zip(([0, 1], [2, 3], [3, 0]), pairs, strict=True):
        if rank in pair:
            own = torch.full((1000,), float(rank))
            dist.all_reduce(own, group=group)
            assert own[0] == sum(pair)
            assert backend_choice(group).name == "shm"
            gathered: list[Any] = [None, None]
            dist.all_gather_object(gathered, rank, group)
            assert gathered == sorted(pair)
    alone = dist.new_group([rank], backend="fddp", use_local_synchronization=True)
    dist.all_reduce(total, group=alone)
    dist.all_reduce(total)
    assert total == world_size
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    along = torch.full((3,), float(rank))
    dist.all_reduce(along, group=mesh.get_group("columns"))
    assert along[0] == (1 if rank < 2 else 5)
    assert dist.get_backend(mesh.get_group("rows")) == "fddp"
    world = dist.group.WORLD
    assert world is not None
    split = world.split_group([0, 1] if rank < 2 else [3, 2], timedelta(seconds=20))
    along = torch.full((100_000,), float(rank))
    split.allreduce([along]).wait()
    assert along[0] == (1 if rank < 2 else 5)
    for pair, group in zip(([0, 1], [2, 3], [3, 0]), pairs, strict=True):
        if rank in pair:
            dist.destroy_process_group(group)


def test_groups_of_some_ranks(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(4, as_default, str(tmp_path), _parts)


def _by_several_threads(rank: int, world_size: int) -> None:
    groups = [new_fddp_group() for _ in range(3)]
    finished = []

    def run(group: dist.ProcessGroup) -> None:
        for size in range(0, 40_000, 401):
            tensor = torch.full((size,), float(rank))
            dist.all_reduce(tensor, group=group)
            assert bool(tensor.eq(world_size * (world_size - 1) / 2).all())
        finished.append(group)

    threads = [threading.Thread(target=run, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(finished) == len(groups)
    for group in groups:
        dist.destroy_process_group(group)


def test_groups_used_by_several_threads(ranks: RankPool) -> None:
    ranks.run(2, _by_several_threads)


# torch 2.15 and newer: 2.14 has the recorder for backends of its own alone.
_RECORDS_ANY_BACKEND = "backend" in (c10d._dump_fr_trace_json.__doc__ or "")


def _observed(rank: int, world_size: int) -> tuple[list[str], list[Any]]:
    """Names in torch's profile, and entries of its flight recorder."""
    group = new_fddp_group()
    with torch.autograd.profiler.profile() as profile:
        dist.all_gather([torch.ones(3)] * world_size, torch.ones(3), group)
        dist.all_reduce(torch.ones(4), group=group)
        dist.barrier(group)
    names = [event.name for event in profile.function_events if "fddp" in event.name]
    entries: list[Any] = []
    if _RECORDS_ANY_BACKEND:
        entries = json.loads(c10d._dump_fr_trace_json(backend="fddp"))["entries"][-2:]
    dist.destroy_process_group(group)
    return names, [(entry["profiling_name"], entry["input_sizes"]) for entry in entries]


def test_profiles_and_flight_recorder_show_operations(ranks: RankPool) -> None:
    for names, entries in ranks.run(2, _observed):
        assert names == ["fddp:all_gather", "fddp:all_reduce", "fddp:barrier"]
        if _RECORDS_ANY_BACKEND:
            assert entries == [("fddp:all_reduce", [[4]]), ("fddp:barrier", [])]


def _miscounted(rank: int, world_size: int) -> str:
    """Rank 1 makes a group of its own, and then both make one that is named by their counts."""
    if rank == 1:
        dist.new_group([1], backend="fddp", use_local_synchronization=True)
    with pytest.raises(fddp.errors.DesyncError) as caught:
        dist.new_group([0, 1], backend="fddp", use_local_synchronization=True)
    if rank == 0:
        dist.new_group([0], backend="fddp", use_local_synchronization=True)
    pair = dist.new_group([0, 1], backend="fddp", use_local_synchronization=True)
    dist.all_reduce(total := torch.ones(1), group=pair)
    assert total.item() == 2.0
    return str(caught.value)


def test_members_that_made_different_numbers_of_groups(ranks: RankPool, tmp_path: Path) -> None:
    over_gloo = [outcome.result for outcome in run_fresh(2, _miscounted)]
    over_fddp = ranks.run(2, as_default, str(tmp_path), _miscounted)
    for text in [*over_gloo, *over_fddp]:
        assert "the name of the process group of ranks 0, 1 is" in text
        assert "these ranks have made different numbers of groups before" in text


def test_registration_is_repeatable() -> None:
    plugin = dist.Backend._plugins["FDDP"]
    register()
    assert dist.Backend._plugins["FDDP"] is plugin
    assert dist.Backend.default_device_backend_map["cpu"] == "gloo"


def _left_behind(rank: int, world_size: int) -> tuple[Resources, set[str]]:
    def use() -> None:
        group = new_fddp_group()
        work = dist.isend(torch.ones(100_000), group=group, group_dst=1 - rank)
        dist.recv(torch.ones(100_000), group=group, group_src=1 - rank)
        work.wait()
        dist.all_reduce(torch.ones(300_000), group=group)
        dist.destroy_process_group(group)

    use()
    before, shared = resources(), {*os.listdir("/dev/shm")}
    for _ in range(5):
        use()
    return growth(before), {*os.listdir("/dev/shm")} - shared


def test_groups_leave_nothing_behind(ranks: RankPool) -> None:
    for beyond, files in ranks.run(2, _left_behind):
        assert not any(beyond), beyond
        assert not any("fddp" in name for name in files)


# Groups that torch gives the same part of the store, works that are polled, a lazy view, and
# communicators of the library, at whose end torch may warn of a device without a backend.
_AGAIN = """
import os, torch, torch.distributed as dist
import fddp
for life in range(2):
    dist.init_process_group(["fddp", "cpu:fddp"][life])
    rank = dist.get_rank()
    for number in range(4):
        group = dist.new_group([0, 1], use_local_synchronization=True)
        total = torch.full((100_000,), float(rank + 10 * number))
        dist.all_reduce(total, group=group)
        assert total.unique().tolist() == [1.0 + 20 * number], (life, number, total)
        dist.destroy_process_group(group)
    for number in range(20):
        works = [dist.isend(torch.full((70_000,), float(number)), 1 - rank)]
        received = torch.empty(70_000)
        works.append(dist.irecv(received, 1 - rank))
        while not all(work.is_completed() for work in works):
            pass
        assert received.unique().item() == number
    values = torch.tensor([1 + 2j, 3 - 4j])
    negative = values.conj().imag  # a view that is negated when it is read
    if rank == 0:
        dist.send(negative, 1)
    else:
        received = torch.zeros(2)
        dist.recv(received, 0)
        assert torch.equal(received, -values.imag), received
    if life == 1:
        with fddp.GradSync([torch.ones(3)]) as sync:
            mean = sync([torch.full([3], 2.0 * rank)])[0]
            mean += fddp.pmean(mean)
        assert dist.get_backend_config() == "cpu:fddp"
        assert mean.tolist() == [2.0] * 3, mean
    dist.destroy_process_group()
os.write(1, f"rank {rank} is done\\n".encode())  # at once
"""


@pytest.mark.nightly
def test_groups_of_the_same_name_and_ends_without_a_warning(tmp_path: Path) -> None:
    (tmp_path / "again.py").write_text(_AGAIN)
    run = torchrun(str(tmp_path / "again.py"))
    assert run.stdout.count("is done") == 2
    assert "No backend of type" not in run.stderr


# Ends of processes that have not destroyed their groups

# More callbacks than can be called before the end. Python would end a thread of the backend that
# calls one later, or that releases a tensor: SIGABRT.
_PENDING_CALLBACKS = """
import atexit, os, torch, torch.distributed as dist
import fddp
dist.init_process_group("fddp")
{before}
size = {size}
kept = []
for _ in range(300):
    work = dist.all_reduce(torch.ones(size), async_op=True)
    kept.append(work.get_future().then(lambda future: torch.ones(3)))
messages = [dist.irecv(torch.ones(3), 1 - dist.get_rank(), tag=tag) for tag in range(9)]
kept += [message.get_future().then(lambda future: torch.ones(3)) for message in messages]
"""
# C++ objects may keep a group beyond the interpreter.
_LEAKED = """
import ctypes
for leaked in (dist.group.WORLD, kept):
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(leaked))
"""


def _ends_with_0(tmp_path: Path, program: str) -> str:
    script = tmp_path / "program.py"
    script.write_text(program)
    return torchrun(str(script)).stdout


@pytest.mark.nightly
@pytest.mark.parametrize("size", [4, pytest.param(100_000, marks=pytest.mark.nightly)])
def test_pending_callbacks(tmp_path: Path, size: int) -> None:
    _ends_with_0(tmp_path, _PENDING_CALLBACKS.format(before="", size=size) + _LEAKED)


def test_handlers_at_exit_may_use_groups(tmp_path: Path) -> None:
    before = """
def end():
    total = torch.ones(3)
    dist.all_reduce(total)
    os.write(1, f"total {total[0].item()}\\n".encode())  # at once
    dist.destroy_process_group()
atexit.register(end)
"""
    program = _PENDING_CALLBACKS.format(before=before, size=4)
    assert _ends_with_0(tmp_path, program).count("total 2.0") == 2


def _timeouts(rank: int, world_size: int) -> tuple[list[float], str]:
    group = new_fddp_group(5.0)
    found = []
    for timeout_s in (5.0, 0.3):
        group.set_timeout(timedelta(seconds=timeout_s))
        with fddp.GradSync({"w": torch.ones(3)}, group=group) as sync:
            found.append(sync._engine.transport.timeout_s)
    text = ""
    dist.barrier()
    if rank == 0:
        with pytest.raises(fddp.SyncTimeoutError) as raised:
            fddp.pmean(torch.ones(3), group)
        text = str(raised.value)
    dist.barrier()
    return found, text


def test_the_timeout_of_the_group_holds_for_the_library(ranks: RankPool) -> None:
    for rank, (found, text) in enumerate(ranks.run(2, _timeouts)):
        assert found == [5.0, 0.3]
        assert ("timeout_s=0.3" in text) == (rank == 0), text
