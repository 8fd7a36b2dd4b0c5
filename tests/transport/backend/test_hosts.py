"""The backend "fddp" over several hosts: shared memory within each, gloo between them.

`HOSTS` makes ranks of one machine find only those of their own host; the `hosts` fixture makes
hosts of namespaces.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.fsdp import fully_shard

import fddp
from fddp.transport.backend import BackendChoice, backend_choice
from fddp.transport.backend.choice import choose_backend
from tests.support.backends import check_equal, new_fddp_group
from tests.support.hosts import crossed_bytes
from tests.support.polling import soon
from tests.support.process_resources import Resources, growth, resources
from tests.support.ranks import Outcome, RankPool, run_fresh, split_into_hosts
from tests.support.wire import connections, traffic_since

if TYPE_CHECKING:
    from tests.support.hosts import Hosts

HOSTS = [[0, 1], [2, 3]]
N_RANKS = 4
_OP = dist.ReduceOp
_TIMEOUT_S = 4.0
_KILLED = -signal.SIGKILL
_REASON = "the ranks are on 2 hosts or parts of them (0-1, 2-3)"


@pytest.mark.parametrize(
    ("hosts", "name", "reason"),
    [
        ([(0, 1, 2)], "shm", "all 3 ranks share the memory of a host"),
        ([(0, 1), (2, 3)], "shm+gloo", "; shared memory within a host, gloo across"),
        ([(0, 1, 2), (3, 4, 5), (6, 7, 8)], "shm+gloo", "shared memory within a host"),
        ([(0,), (1,)], "gloo", "described"),
        ([(0, 1), (2,)], "gloo", "described; the hosts have different numbers of ranks"),
        ([(0, 2), (1, 3)], "gloo", "described; the ranks of a host do not follow each other"),
        ([(0, 1), (2, 4), (3, 5)], "gloo", "do not follow each other"),
    ],
)
def test_the_choice(hosts: list[tuple[int, ...]], name: str, reason: str) -> None:
    choice = choose_backend(hosts, "described")
    assert choice.name == name
    assert choice.reason.endswith(reason) or reason in choice.reason


def _group(timeout_s: float = 60.0) -> dist.ProcessGroup:
    """A group of all ranks on two hosts."""
    with split_into_hosts(HOSTS):
        return new_fddp_group(timeout_s)


def _chosen(rank: int, world_size: int) -> tuple[BackendChoice, BackendChoice]:
    group = _group()
    with split_into_hosts([[0, 2], [1, 3]]):
        crossed = new_fddp_group()
    total = torch.ones(3)
    dist.all_reduce(total, group=crossed)
    assert total[0] == world_size
    choices = backend_choice(group), backend_choice(crossed)
    for made in (group, crossed):
        dist.destroy_process_group(made)
    return choices


def test_the_choice_of_a_group(ranks: RankPool) -> None:
    for choice, crossed in ranks.run(N_RANKS, _chosen):
        assert choice == ("shm+gloo", f"{_REASON}; shared memory within a host, gloo across")
        assert crossed.name == "gloo"
        assert crossed.reason.endswith("the ranks of a host do not follow each other")


def _numbers_and_layouts(rank: int, world_size: int) -> None:
    group = _group()
    everywhere = torch.tensor([rank == 0, True, False] * 10_000)
    dist.all_reduce(everywhere, _OP.MIN, group)
    check_equal([everywhere], [torch.tensor([False, True, False] * 10_000)])
    for size in (5, 50_001):
        scaled = torch.ones(size)
        dist.all_reduce(scaled, dist._make_nccl_premul_sum(rank + 1.0), group)
        check_equal([scaled], [torch.full((size,), 10.0)])
        part = torch.zeros(size)
        options = c10d.ReduceScatterOptions()
        options.reduceOp = dist._make_nccl_premul_sum(rank + 1.0)
        group._reduce_scatter_base(part, torch.ones(4 * size), options).wait()
        check_equal([part], [torch.full((size,), 10.0)])
        mean = torch.full((size,), rank + 1j)
        dist.all_reduce(mean, _OP.AVG, group)
        check_equal([mean], [torch.full((size,), 1.5 + 1j)])
        numbers = torch.full((size,), rank, dtype=torch.int16)
        dist.broadcast(numbers, group=group, group_src=3)
        gathered = torch.empty(4 * size, dtype=torch.complex128)
        group._allgather_base(gathered, mean.to(torch.complex128)).wait()
        check_equal([numbers, gathered[size:]], [numbers.new_full((size,), 3), gathered[:-size]])
    rows = torch.arange(120_000.0).reshape(300, 400)
    dist.all_reduce(rows.t()[::2], group=group)
    expected = torch.arange(120_000.0).reshape(300, 400)
    expected[:, ::2] *= world_size
    check_equal([rows], [expected])
    halves = torch.full((4, 6), rank, dtype=torch.int16).t()[:, ::2]
    dist.all_to_all_single(halves[:4], torch.arange(8).view(4, 2).to(torch.int16), group=group)
    assert halves[:4].tolist() == [[2 * rank, 2 * rank + 1]] * 4
    leaf = torch.ones(9_999, requires_grad=True)
    dist.all_reduce(leaf, group=group)
    check_equal([leaf.detach()], [torch.full((9_999,), 4.0)])
    untouched = torch.full((70_000,), float(rank))
    dist.reduce(untouched, group=group, group_dst=2)
    check_equal([untouched], [torch.full((70_000,), 6.0 if rank == 2 else float(rank))])
    dist.destroy_process_group(group)


def test_numbers_and_layouts(ranks: RankPool) -> None:
    ranks.run(N_RANKS, _numbers_and_layouts)


def _same_bits(rank: int, world_size: int) -> list[torch.Tensor]:
    group = _group()
    generator = torch.Generator().manual_seed(rank)
    totals = []
    for size in (100, 60_001, 5_000_003):
        for dtype in (torch.float32, torch.bfloat16):
            total = torch.randn(size, generator=generator).to(dtype)
            exact = total.double()
            dist.all_reduce(total, group=group)
            dist.all_reduce(exact, group=group)
            largest = exact.abs().max()
            torch.testing.assert_close(
                total.double(), exact, rtol=0, atol=float(largest) * torch.finfo(dtype).eps * 4
            )
            totals.append(total)
    dist.destroy_process_group(group)
    return totals


def test_all_ranks_have_the_same_bits(ranks: RankPool) -> None:
    first, *others = ranks.run(N_RANKS, _same_bits)
    for other in others:
        check_equal(first, other)


def _works(rank: int, world_size: int) -> None:
    group = _group()
    order: list[int] = []
    tensors = [torch.full((size,), 1.0) for size in (1, 200_000, 3, 0)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    futures = [
        work.get_future().then(lambda future, i=i: (order.append(i), future.value())[1])
        for i, work in enumerate(works)
    ]
    # Messages wait for none of them.
    exchanged = torch.empty(4)
    last = dist.all_to_all_single(exchanged, torch.arange(4.0), group=group, async_op=True)
    sent = dist.isend(torch.full((7,), float(rank)), group=group, group_dst=rank ^ 2)
    received = torch.empty(7)
    dist.recv(received, group=group, group_src=rank ^ 2)
    sent.wait()
    check_equal([received], [torch.full((7,), float(rank ^ 2))])
    last.wait()
    assert all(work.is_completed() for work in works)
    for future, tensor in zip(futures, tensors, strict=True):
        check_equal(future.wait(), [torch.full_like(tensor, float(world_size))])
    assert order == [0, 1, 2, 3]
    check_equal([exchanged], [torch.full((4,), float(rank))])
    with pytest.raises(RuntimeError, match="expected 8 elements, 4 times as many"):
        group._allgather_base(torch.empty(7), torch.empty(2))
    with pytest.raises(RuntimeError, match="rank 9 is not in the group of 4"):
        group.broadcast([torch.ones(1)], _with_root(9))
    # An argument that gloo refuses leaves the group usable.
    with pytest.raises((RuntimeError, ValueError)):
        dist.all_reduce(torch.eye(3).to_sparse(), _OP.MIN, group)
    dist.barrier(group)
    dist.destroy_process_group(group)


def _with_root(root: int) -> Any:
    options = c10d.BroadcastOptions()
    options.rootRank = root
    return options


def test_works_and_futures(ranks: RankPool) -> None:
    ranks.run(N_RANKS, _works)


def _by_several_threads(rank: int, world_size: int) -> None:
    groups = [_group() for _ in range(3)]
    finished = []

    def run(group: dist.ProcessGroup) -> None:
        for size in range(0, 20_000, 997):
            tensor = torch.full((size,), float(rank))
            dist.all_reduce(tensor, group=group)
            assert bool(tensor.eq(6).all())
        finished.append(group)

    threads = [threading.Thread(target=run, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(finished) == len(groups)
    for group in groups if rank else groups[::-1]:
        dist.destroy_process_group(group)


def test_groups_used_by_several_threads(ranks: RankPool) -> None:
    ranks.run(N_RANKS, _by_several_threads)


def _trained(rank: int, world_size: int) -> None:
    """DDP and FSDP2 over a group on two hosts."""
    group = _group()
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(100, 300), torch.nn.Linear(300, 1))
    alone = torch.nn.Sequential(torch.nn.Linear(100, 300), torch.nn.Linear(300, 1))
    alone.load_state_dict(module.state_dict())
    inputs = torch.randn(world_size, 4, 100)
    wrapped = torch.nn.parallel.DistributedDataParallel(module, process_group=group)
    wrapped(inputs[rank]).square().mean().backward()
    alone(inputs.flatten(0, 1)).square().mean().backward()
    for one, other in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    del wrapped
    mesh = dist.DeviceMesh.from_group(group, "cpu")
    sharded = torch.nn.Sequential(torch.nn.Linear(100, 300), torch.nn.Linear(300, 1))
    sharded.load_state_dict(alone.state_dict())
    fully_shard(sharded, mesh=mesh)
    sharded(inputs[rank]).square().mean().backward()
    for one, other in zip(sharded.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad)
    dist.destroy_process_group(group)


def test_wrapped_models(ranks: RankPool) -> None:
    ranks.run(N_RANKS, _trained)


def _through_fddp(rank: int, world_size: int, folder: str) -> None:
    """The library itself on a default group over two hosts."""
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/store", world_size)
    with split_into_hosts(HOSTS):
        dist.init_process_group("fddp", store=store, rank=rank, world_size=world_size)
        assert backend_choice().name == "shm+gloo"
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
        part = dist.group.WORLD.split_group([0, 3] if rank in (0, 3) else [1, 2])
        total = torch.full((10,), float(rank))
        part.allreduce([total]).wait()
        assert total[0] == 3.0
        assert part._get_backend(torch.device("cpu")).name() == "gloo"
    dist.barrier()
    dist.destroy_process_group()


def test_the_library_on_such_a_group(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(N_RANKS, _through_fddp, str(tmp_path))


_SIZE = 300_000  # numbers of 4 bytes


def _all_reduce(group: dist.ProcessGroup) -> None:
    dist.all_reduce(torch.ones(_SIZE), group=group)


def _all_gather(group: dist.ProcessGroup) -> None:
    outputs = [torch.empty(_SIZE) for _ in range(4)]
    dist.all_gather(outputs, torch.ones(_SIZE), group)


def _all_gather_single(group: dist.ProcessGroup) -> None:
    group._allgather_base(torch.empty(4 * _SIZE), torch.ones(_SIZE)).wait()


def _reduce_scatter(group: dist.ProcessGroup) -> None:
    group._reduce_scatter_base(torch.empty(_SIZE), torch.ones(4 * _SIZE)).wait()


def _broadcast(group: dist.ProcessGroup) -> None:
    dist.broadcast(torch.ones(_SIZE), group=group, group_src=1)


# Bytes from all ranks to those of the other host, in units of the tensor above.
_CROSSING: list[tuple[Callable[[dist.ProcessGroup], None], int]] = [
    (_all_reduce, 2),  # the shards of a host, in either direction
    (_all_gather, 4),
    (_all_gather_single, 4),
    (_reduce_scatter, 4),
    (_broadcast, 1),
]


def _sent(rank: int, world_size: int) -> list[int]:
    """Bytes that this rank sends over TCP for each of these, without those of the store."""
    group = _group()
    sent = []
    for call, _ in _CROSSING:
        dist.barrier(group)
        before = connections()
        call(group)
        # After the second barrier all that was sent before the first has left this rank.
        dist.barrier(group)
        dist.barrier(group)
        sent.append(traffic_since(before).sent)
    dist.barrier(group)  # a rank that destroys it closes connections of the others
    dist.destroy_process_group(group)
    return sent


def test_only_shards_are_sent(ranks: RankPool) -> None:
    by_rank = ranks.run(N_RANKS, _sent)
    for (call, units), sent in zip(_CROSSING, zip(*by_rank, strict=True), strict=True):
        print(f"{call.__name__}: {sent} bytes sent by the ranks")
        assert units * 4 * _SIZE <= sum(sent) <= units * 4 * _SIZE + 4 * N_RANKS * 1000
        if units > 1:
            assert max(sent) - min(sent) < 4000, "all ranks send the same"


def _crossing(rank: int, world_size: int) -> tuple[BackendChoice, list[int]]:
    group = new_fddp_group()
    crossed = []
    for call, _ in _CROSSING:
        dist.barrier(group)
        time.sleep(0.1)
        before = crossed_bytes()
        dist.barrier(group)
        for _ in range(3):
            call(group)
        dist.barrier(group)
        time.sleep(0.1)
        crossed.append((crossed_bytes() - before) // 3)
    choice = backend_choice(group)
    dist.destroy_process_group(group)
    return choice, crossed


def test_only_shards_cross_hosts(hosts: Hosts) -> None:
    for choice, crossed in hosts.run(N_RANKS, _crossing):
        assert choice == ("shm+gloo", f"{_REASON}; shared memory within a host, gloo across")
        for (call, units), crossed_bytes_ in zip(_CROSSING, crossed, strict=True):
            payload = units * 4 * _SIZE
            print(f"{call.__name__}: {crossed_bytes_} bytes crossed, payload {payload}")
            # A segment of 1448 bytes has 66 around it, and one of 66 may answer it.
            assert payload < crossed_bytes_ < payload * (1 + 132 / 1448) + 60_000


def _call(kind: str, group: dist.ProcessGroup) -> None:
    if kind == "async":
        dist.all_reduce(torch.ones(500_000), group=group, async_op=True).get_future().wait()
    elif kind == "barrier":
        dist.barrier(group)
    elif kind == "all_to_all":
        dist.all_to_all_single(torch.empty(4000), torch.ones(4000), group=group)
    elif kind == "broadcast":
        dist.broadcast(torch.ones(500_000), group=group, group_src=3)
    elif kind == "many":
        for _ in range(100_000):
            dist.all_reduce(torch.ones(500_000), group=group)
    else:
        dist.all_reduce(torch.ones(500_000 if kind == "large" else 1), group=group)


def _with_lost_ranks(
    rank: int, world_size: int, kind: str, lost: list[int]
) -> tuple[list[str], float]:
    group = _group(20.0)
    dist.barrier(group)
    if rank in lost:
        os.kill(os.getpid(), signal.SIGKILL)
    begin_s = time.perf_counter()
    texts = []
    for again in (kind, "large"):
        with pytest.raises(RuntimeError) as caught:
            _call(again, group)
        texts.append(str(caught.value))
    waited_s = time.perf_counter() - begin_s
    if kind != "small":  # else the process ends without it
        dist.destroy_process_group(group)
    return texts, waited_s


def _check_survivors(survivors: list[Outcome], lost: list[int], words: str) -> None:
    for rank, outcome in enumerate(survivors):
        if rank in lost:
            assert outcome.exitcode == _KILLED
            continue
        assert (outcome.error, outcome.exitcode) == (None, 0)
        texts, waited_s = outcome.result
        print(rank, texts, f"{waited_s:.2f} s")
        for text in texts:
            assert re.search(words, text)
        assert waited_s < 10.0
    causes = {
        text.split(": ")[1] for outcome in survivors if outcome.result for text in outcome.result[0]
    }
    assert len(causes) == 1


@pytest.mark.parametrize("kind", ["small", "large", "async", "barrier", "all_to_all", "broadcast"])
def test_a_killed_rank_is_named(kind: str) -> None:
    survivors = run_fresh(N_RANKS, _with_lost_ranks, kind, [3])
    _check_survivors(survivors, [3], "rank 3 left the group, or its process has ended")


def test_a_killed_host_is_named() -> None:
    survivors = run_fresh(N_RANKS, _with_lost_ranks, "large", [2, 3])
    # One of them may be lost after the others have agreed on the cause.
    words = "(ranks 2, 3|rank 2|rank 3) left the group, or (its|their) process"
    _check_survivors(survivors, [2, 3], words)


def _with_late_ranks(rank: int, world_size: int, kind: str, late: list[int]) -> str:
    group = _group(_TIMEOUT_S)
    dist.barrier(group)
    if rank in late:
        time.sleep(3 * _TIMEOUT_S)
    with pytest.raises(RuntimeError) as caught:
        _call(kind, group)
    dist.destroy_process_group(group)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "late", "words"),
    [
        ("small", [3], "rank 3"),
        ("large", [1], "rank 1"),
        ("all_to_all", [3], "rank 3"),
        ("large", [2, 3], "ranks 2, 3"),
    ],
)
def test_a_late_rank_is_named_on_every_rank(
    kind: str, late: list[int], words: str, ranks: RankPool
) -> None:
    for text in ranks.run(N_RANKS, _with_late_ranks, kind, late):
        assert f"{words} did not take part within the timeout of {_TIMEOUT_S:.0f} s" in text


def _stopped_in_a_call(rank: int, world_size: int, kind: str, stopped: int) -> tuple[str, float]:
    """A rank is stopped before its call, or amid many, and goes on once all others have failed."""
    store = c10d._get_default_store()
    group = _group(_TIMEOUT_S)
    if rank == stopped:
        store.set("pid", str(os.getpid()))
    dist.barrier(group)
    pid = int(store.get("pid"))
    waker = 0 if stopped else 1
    if kind != "many":
        if rank == stopped:
            os.kill(pid, signal.SIGSTOP)
    elif rank == waker:
        # Within the host, between hosts, or between two calls.
        threading.Timer(0.3, os.kill, (pid, signal.SIGSTOP)).start()
    begin_s = time.perf_counter()
    with pytest.raises(RuntimeError) as caught:
        _call(kind, group)
    waited_s = time.perf_counter() - begin_s
    if rank != stopped:
        store.add("failed", 1)
    if rank == waker:
        while store.add("failed", 0) < world_size - 1:
            time.sleep(0.05)
        os.kill(pid, signal.SIGCONT)
    dist.destroy_process_group(group)
    return str(caught.value), waited_s


def _with_a_stopped_rank(
    rank: int, world_size: int, kind: str, stopped: int
) -> tuple[str, float, Resources]:
    dist.destroy_process_group(_group())  # the first group leaves a thread and files of torch
    before = resources()
    text, waited_s = _stopped_in_a_call(rank, world_size, kind, stopped)
    dist.barrier()
    return text, waited_s, growth(before)


def _check_stopped(outcomes: list[tuple[str, float, Resources]], stopped: int) -> None:
    for rank, (text, waited_s, beyond) in enumerate(outcomes):
        print(rank, text, f"{waited_s:.2f} s", beyond)
        assert f"rank {stopped} did not take part within the timeout of {_TIMEOUT_S:.0f} s" in text
        assert rank == stopped or waited_s < _TIMEOUT_S + 6.0
        assert beyond == Resources(0, 0, 0)


@pytest.mark.parametrize(
    ("kind", "stopped"),
    [("small", 0), ("many", 3), ("all_to_all", 1), ("async", 2)],
)
def test_a_stopped_rank_is_named_on_every_rank(kind: str, stopped: int, ranks: RankPool) -> None:
    _check_stopped(ranks.run(N_RANKS, _with_a_stopped_rank, kind, stopped), stopped)


def test_a_rank_that_is_stopped_on_another_host_is_named(hosts: Hosts) -> None:
    _check_stopped(hosts.run(N_RANKS, _with_a_stopped_rank, "large", 3), 3)


def _is_stopped(pid: int) -> bool:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0] == "T"


def _with_a_stopped_store(rank: int, world_size: int) -> str:
    """Rank 0 runs the store of these hosts."""
    group = _group(_TIMEOUT_S)
    pids = [torch.tensor(0) for _ in range(world_size)]
    dist.all_gather(pids, torch.tensor(os.getpid()), group)
    dist.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    with pytest.raises(RuntimeError) as caught:
        _call("large", group)
    if rank == world_size - 1:
        time.sleep(3.0)  # until all have raised
        os.kill(int(pids[0]), signal.SIGCONT)
    # A rank that leaves before the others have raised would be named instead.
    assert soon(lambda: not _is_stopped(int(pids[0])))
    dist.destroy_process_group(group)
    dist.barrier()
    return str(caught.value)


def test_the_store_of_a_stopped_rank(hosts: Hosts) -> None:
    _, *texts = hosts.run(N_RANKS, _with_a_stopped_store)
    late = f"did not take part within the timeout of {_TIMEOUT_S:.0f} s"
    assert texts[0].endswith(f": rank 0 {late}")
    for text in texts[1:]:
        # A rank that began later may first see that another one has given up.
        assert f"one of ranks 0, 1 {late}" in text or "Connection closed by peer" in text
        assert text.endswith("; the store of the group does not answer")


def _mismatched(rank: int, world_size: int) -> str:
    group = _group(20.0)
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(torch.ones(4 if rank == 3 else 3), group=group)
    dist.destroy_process_group(group)
    return str(caught.value)


def test_differing_calls_within_a_host_are_named(ranks: RankPool) -> None:
    for text in ranks.run(N_RANKS, _mismatched):
        assert "rank 2 all_reduce (sum) of Float, 12 bytes, rank 3 all_reduce" in text


def _mismatched_across(rank: int, world_size: int) -> list[str]:
    """As with the variable TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    group = _group(20.0)
    dist.set_debug_level_from_env()
    assert backend_choice(group).name == "shm+gloo"
    first_host = rank < 2
    tensor = torch.ones(3)

    def reduce_or_gather() -> None:
        if first_host:
            dist.all_reduce(tensor, group=group)
        else:
            dist.all_gather([torch.ones(3) for _ in range(world_size)], tensor, group)

    texts = []
    for call in (
        reduce_or_gather,
        lambda: dist.all_reduce(torch.ones(3 if first_host else 4), group=group),
        lambda: dist.all_reduce(torch.ones(300_000 if first_host else 3), group=group),
        lambda: dist.broadcast(tensor.double() if first_host else tensor, group=group, group_src=0),
    ):
        with pytest.raises(RuntimeError) as caught:
            call()
        texts.append(str(caught.value))
        total = torch.ones(5)  # the group can still be used
        dist.all_reduce(total, group=group)
        assert bool(total.eq(world_size).all())
    dist.destroy_process_group(group)
    return texts


def test_differing_calls_on_hosts_are_named_in_debug_mode(ranks: RankPool) -> None:
    pairs = [("ALLREDUCE", "ALLGATHER"), ("[3]", "[4]"), ("[300000]", "[3]"), ("Double", "Float")]
    for texts in ranks.run(N_RANKS, _mismatched_across):
        for text, pair in zip(texts, pairs, strict=True):
            for described in pair:
                assert re.search(rf"Rank \d is running collective[^)]*{re.escape(described)}", text)


def _closed(rank: int, world_size: int) -> list[str]:
    group = _group(20.0)
    dist.barrier(group)
    texts = []
    if rank == 3:
        time.sleep(1.5)
    works = [dist.all_reduce(torch.ones(100_000), group=group, async_op=True) for _ in "ab"]
    if rank == 0:
        time.sleep(0.5)
        group.abort()
        with pytest.raises(RuntimeError, match="the group was closed on this rank"):
            dist.all_reduce(torch.ones(3), group=group)
    # What rank 0 had started to send may complete the first one on others.
    for work in works if rank == 0 else works[1:]:
        with pytest.raises(RuntimeError) as caught:
            work.wait()
        assert work.is_completed()
        texts.append(str(caught.value))
    dist.barrier()
    dist.destroy_process_group(group)
    return texts


def test_abort_ends_pending_works(ranks: RankPool) -> None:
    by_rank = ranks.run(N_RANKS, _closed)
    assert all("the group was closed on this rank" in text for text in by_rank[0])
    for texts in by_rank[1:]:
        assert all("rank 0 left the group" in text for text in texts)


def _left_behind(rank: int, world_size: int) -> Resources:
    def use() -> None:
        group = _group()
        dist.all_reduce(torch.ones(300_000), group=group)
        dist.destroy_process_group(group)

    use()
    dist.barrier()
    before = resources()
    for _ in range(3):
        use()
    dist.barrier()
    return growth(before)


def test_groups_leave_nothing_behind(ranks: RankPool) -> None:
    assert ranks.run(N_RANKS, _left_behind) == [Resources(0, 0, 0)] * N_RANKS


def _without_a_destroy(rank: int, world_size: int) -> None:
    global _kept  # lives until the interpreter ends
    _kept = [_group(), _group()]
    _kept.append(dist.all_reduce(torch.ones(300_000), group=_kept[0], async_op=True))
    _kept[2].wait()


def test_processes_end_without_a_destroy() -> None:
    assert run_fresh(N_RANKS, _without_a_destroy) == [Outcome(None, None, 0)] * N_RANKS
