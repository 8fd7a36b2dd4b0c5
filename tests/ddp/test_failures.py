"""Errors on all ranks after one rank of a wrapped module fails outside of backward, or is lost."""

from __future__ import annotations

import functools
import math
import os
import signal
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel.distributed import _BufferCommHookLocation

import fddp
from tests.support.backward_calls import call_in_backward
from tests.support.endings import ending
from tests.support.groups import impatient, rank_of
from tests.support.ranks import RankPool, run_fresh
from tests.support.wrapped_net import (
    DDP,
    TINY_CAP_MB,
    WIDTH,
    Net,
    assert_close,
    batch,
    fail_in_backward,
    grads,
    net,
    run_backward,
)

BAD = 1  # the rank that fails
FAILING = 2  # the step that it fails in
STEPS = 4
PLACES = ("input", "micro-batch", "forward", "loss", "graph", "backward", "update")


class FailingNet(Net):
    """A net, optionally with buffers, whose forward and backward can be made to fail."""

    def __init__(self, *, with_buffers: bool) -> None:
        super().__init__()
        self.load_state_dict(net().state_dict())
        self.norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64) if with_buffers else nn.Identity()
        self.fails_in_forward = False

    def forward(self, x: Tensor, through: tuple[int, ...] = (0, 1, 2)) -> Tensor:
        if self.fails_in_forward:
            raise ValueError("no forward here")
        return self.norm(super().forward(x, through))


class Run(NamedTuple):
    """Results of one rank."""

    said: str  # the error of the step that failed
    grads: list[dict[str, Any]]  # of the other steps
    buffers: dict[str, Tensor]


def take(ddp: Any, rank: int, number: int, place: str, *, in_parts: bool) -> None:
    """A step, which fails at `place`."""
    model = ddp.module
    ddp.zero_grad()
    with ddp.in_step():
        if place == "input":
            raise ValueError("no input here")
        if in_parts:
            with ddp.no_sync():
                out = ddp(batch(rank, 10 + number))
                if place == "micro-batch":
                    raise ValueError("no micro-batch here")
                out.square().mean().backward()
        model.fails_in_forward, model.fails_in_backward = place == "forward", place == "backward"
        out = ddp(batch(rank, number))
        if place == "loss":
            raise ValueError("no loss here")
        if place == "graph":
            out = call_in_backward(out, fail_in_backward)
        out.square().mean().backward()
        if place == "update":
            raise ValueError("no update here")


def steps(group: Any, place: str, buffers: str, in_parts: bool) -> Run:
    model = FailingNet(with_buffers=buffers != "none")
    ddp = DDP(model, process_group=group, bucket_cap_mb=TINY_CAP_MB)
    if buffers == "after":
        ddp._register_buffer_comm_hook(ddp, take_first, _BufferCommHookLocation.POST_FORWARD)
    rank, said, found = rank_of(group), "", []
    for number in range(STEPS):
        fails = place if (number, rank) == (FAILING, BAD) else ""
        try:
            take(ddp, rank, number, fails, in_parts=in_parts)
        except (ValueError, fddp.PeerError) as error:
            said = f"{type(error).__name__}: {error}"
        model.fails_in_forward = model.fails_in_backward = False
        if number != FAILING:
            found.append(grads(model))
    ddp.eval()
    with torch.no_grad():
        ddp(batch(rank))
    return Run(said, found, dict(model.named_buffers()))


def take_first(ddp: Any, buffers: dict[str, Tensor]) -> list[Any]:
    """A buffer hook that communicates."""
    for buffer in buffers.values():
        ddp.steps.engine.transport.broadcast(buffer.data, 0).wait("a buffer")
    return []


@functools.cache
def undisturbed(buffers: str, *, in_parts: bool = False) -> list[Run]:
    return fddp.loopback(3, steps, "", buffers, in_parts)


CASES = [
    *((place, buffers) for place in PLACES for buffers in ("none", "before")),
    *((place, "after") for place in ("input", "forward", "loss")),
]


@pytest.mark.parametrize(("place", "buffers"), CASES)
def test_errors_in_a_step_are_raised_on_all_ranks(place: str, buffers: str) -> None:
    in_parts = place == "micro-batch"
    runs = fddp.loopback(3, steps, place, buffers, in_parts)
    wanted = undisturbed(buffers, in_parts=in_parts)
    for rank, found in enumerate(runs):
        if rank == BAD:
            assert found.said.startswith("ValueError: no ")
        elif place == "update":  # the step had ended, on all ranks
            assert found.said == ""
        else:
            answer = f"rank {BAD} failed at step {FAILING}: {runs[BAD].said}; no gradients"
            assert found.said.startswith(f"PeerError: {answer}")
        for mine, other in zip(found.grads, wanted[rank].grads, strict=True):
            assert_close(mine, other)
        assert_close(found.buffers, runs[0].buffers)


def on_processes(rank: int, world_size: int, fn: Any, *args: Any) -> Any:
    return fn(dist.group.WORLD, *args)


def test_processes_report_failures(ranks: RankPool) -> None:
    runs = ranks.run(3, on_processes, steps, "loss", "before", False)
    for rank, (found, wanted) in enumerate(zip(runs, undisturbed("before"), strict=True)):
        begins = "ValueError: no " if rank == BAD else f"PeerError: rank {BAD} failed at step 2: "
        assert found.said.startswith(f"{begins}{'' if rank == BAD else runs[BAD].said}")
        for mine, other in zip(found.grads, wanted.grads, strict=True):
            assert_close(mine, other)


# Beside operators


class Meeting(FailingNet):
    """Averages in the midst of its forward pass, and so in its backward pass."""

    def __init__(self, group: Any) -> None:
        super().__init__(with_buffers=True)
        self.group = group

    def forward(self, x: Tensor, through: tuple[int, ...] = (0, 1, 2)) -> Tensor:
        return fddp.pmean(super().forward(x, through), self.group)


def steps_beside_operators(group: Any, place: str, hooked: bool) -> tuple[list[str], Any]:
    model = FailingNet(with_buffers=True) if hooked else Meeting(group)
    ddp = DDP(model, process_group=group, bucket_cap_mb=TINY_CAP_MB)
    if hooked:  # operators of hooks, which run on ranks that have failed as well
        own = fddp.Communicator(group)
        ddp._register_buffer_comm_hook(own, mean_of_first, _BufferCommHookLocation.POST_FORWARD)
        ddp.register_comm_hook(own, mean_by_operator)
    rank, said = rank_of(group), []
    for number in range(STEPS):
        try:
            fails = place if (number, rank) == (FAILING, BAD) else ""
            take(ddp, rank, number, fails, in_parts=False)
        except (ValueError, fddp.PeerError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said, grads(ddp.module)


def mean_of_first(own: Any, buffers: dict[str, Tensor]) -> list[Any]:
    """A buffer hook that calls an operator."""
    mean = buffers["norm.running_mean"].data
    mean.copy_(fddp.pmean(mean, own))
    return []


def mean_by_operator(own: Any, bucket: Any) -> Any:
    """A communication hook that calls an operator."""
    future: Any = torch.futures.Future()
    future.set_result(fddp.pmean(bucket.buffer(), own))
    return future


def check_beside_operators(runs: list[Any], wanted: list[Any]) -> None:
    for rank, (said, found) in enumerate(runs):
        assert len(said) == 1
        assert said[0].startswith("ValueError" if rank == BAD else "PeerError: ")
        assert f"rank {BAD} failed" in said[0] or rank == BAD
        assert runs[BAD][0][0] in said[0], "not a timeout"
        assert_close(found, wanted[rank][1])


@functools.cache
def undisturbed_operators(*, hooked: bool) -> list[Any]:
    return fddp.loopback(3, steps_beside_operators, "", hooked)


@pytest.mark.parametrize("place", ["input", "forward", "loss", "graph"])
@pytest.mark.parametrize("hooked", [False, True])
def test_errors_reach_ranks_in_operators(place: str, hooked: bool) -> None:
    runs = fddp.loopback(3, steps_beside_operators, place, hooked)
    check_beside_operators(runs, undisturbed_operators(hooked=hooked))


def test_errors_reach_processes_in_operators(ranks: RankPool) -> None:
    runs = ranks.run(3, on_processes, steps_beside_operators, "graph", False)
    check_beside_operators(runs, undisturbed_operators(hooked=False))


# Loops of unequal length


def joining(ddp: Any, rank: int, batches: int, *, dies: bool = False, **options: Any) -> None:
    with ddp.join(**options):
        for number in range(batches):
            with ddp.in_step():
                out = ddp(batch(rank, number))
                if number == batches - 1 and dies:
                    os.kill(os.getpid(), signal.SIGKILL)
                out.square().mean().backward()


def exhausted(group: Any) -> str:
    ddp = DDP(FailingNet(with_buffers=True), process_group=group)
    batches = (1, 5, 3)[rank_of(group)]
    return ending(
        lambda: joining(ddp, rank_of(group), batches, throw_on_early_termination=True)
    ).text


def test_exhausted_rank_makes_all_leave_join() -> None:
    said = fddp.loopback(3, exhausted)
    detected = "Detected at least one rank that exhausted inputs. Throwing across all"
    assert said[0] == "Rank 0 exhausted all inputs."
    assert said[1].startswith(detected)
    assert said[2].startswith(detected)


def going_on(
    group: Any, bad: str, leaves: tuple[int, ...]
) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
    """Loops over unequal inputs; the last rank's last step is bad. All but `leaves` continue."""
    rank, said, batches = rank_of(group), [], (1, 5, 3)
    model = FailingNet(with_buffers=True)
    policy = "raise" if bad == "number" else "propagate"
    ddp = DDP(model, process_group=group, nonfinite=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with ddp.join():
            for number in range(batches[rank]):
                optimizer.zero_grad()
                is_bad = (rank, number) == (2, 2)
                try:
                    with ddp.in_step():
                        if is_bad and bad == "data":
                            raise ValueError("no data here")
                        factor = math.nan if is_bad and bad == "number" else 1.0
                        (ddp(batch(rank, number)).square().mean() * factor).backward()
                    optimizer.step()
                    said.append("ok")
                except (ValueError, fddp.PeerError, fddp.NonFiniteError) as error:
                    said.append(f"{type(error).__name__}: {error}")
                    if rank in leaves:
                        raise
    except (ValueError, fddp.FddpError) as error:
        said.append(f"left with {type(error).__name__}: {error}")
    optimizer.zero_grad()
    ddp(batch(rank)).square().mean().backward()  # all are together, wherever they left
    return said, grads(model), {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("bad", ["data", "number"])
@pytest.mark.parametrize("leaves", [(), (1, 2), (2,)])
def test_ranks_that_have_run_out_take_a_failed_step_as_the_others_do(
    leaves: tuple[int, ...], bad: str
) -> None:
    """Those that have caught its error continue; if all others leave `join()`, so do they. Where
    one leaves, the remaining ones name it."""
    first, second, third = fddp.loopback(3, going_on, bad, leaves)
    name = "PeerError: rank 2 failed" if bad == "data" else "NonFiniteError: step 2: "
    own = "ValueError: no data here" if bad == "data" else name
    assert (first[0][0], second[0][:2], third[0][:2]) == ("ok", ["ok"] * 2, ["ok"] * 2)
    assert second[0][2].startswith(name)
    assert third[0][2].startswith(own)
    if not leaves:
        assert (first[0][1:], second[0][3:], third[0][3:]) == ([], ["ok"] * 2, [])
    else:
        assert first[0][1].startswith(f"left with {name}")
        assert third[0][3:] == [f"left with {third[0][2]}"]
    if leaves == (1, 2):
        assert second[0][3:] == [f"left with {second[0][2]}"]
    if leaves == (2,):
        assert second[0][3:] == [
            "left with RankLostError: join() on rank 1 of 3: lost rank 2, which left the block "
            "with an error after step 2 had failed on all ranks; catch the error of such a step "
            "within the block on all ranks, or on none"
        ]
    for found in (second, third):
        assert_close(found[1], first[1])
        if not leaves:
            assert_close(found[2], first[2])


def killed_in_join(rank: int, world_size: int, transport: Any) -> tuple[Any, ...]:
    ddp = DDP(FailingNet(with_buffers=True), transport=transport)
    try:
        joining(ddp, rank, (1, 5, 3)[rank], dies=rank == 2)
    except fddp.RankLostError as error:
        return error.ranks, str(error)
    return (), ""


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_a_rank_that_is_killed_within_join_is_named(transport: str) -> None:
    *others, last = run_fresh(3, killed_in_join, transport)
    assert last.exitcode == -signal.SIGKILL
    for outcome in others:
        assert outcome.error is None
        lost, text = outcome.result
        assert lost == (2,)
        assert "lost rank 2" in text


def test_joined_ranks_name_lost_ranks() -> None:
    def run(group: Any) -> str:
        ddp = DDP(net(), process_group=group)
        with ddp.join():
            for number in range(1 + group.rank):
                if number == 2:
                    raise ValueError("no data here")
                run_backward(ddp, group, number)
        return "ended"

    first, second, third = fddp.loopback(3, lambda group: ending(lambda: run(group)))
    assert third.kinds[0] == "ValueError"
    for rank, end in enumerate((first, second)):
        where = f"exchange of inputs in join() (1 bytes) on rank {rank} of 3: lost rank 2"
        assert end.kinds[0] == "RankLostError"
        assert end.text.startswith(where)


# Texts


@pytest.mark.parametrize("how", ["in backward", "in forward"])
def test_closed_wrapper_names_reason_and_remedy(how: str) -> None:
    def run(group: Any) -> list[str]:
        ddp = DDP(FailingNet(with_buffers=True), process_group=group, bucket_cap_mb=TINY_CAP_MB)
        out = ddp(batch(group.rank))
        if group.rank == BAD:
            return []
        forward = partial(ddp, batch(group.rank))
        backward = partial(out.sum().backward, retain_graph=True)
        ends = map(ending, (backward if how == "in backward" else forward, forward, backward))
        return [f"{end.kinds[0]}: {end.text}" for end in ends]

    lost, *others = fddp.loopback(2, run)[0]
    assert lost.startswith("RankLostError: ")
    for text in others:
        assert text.startswith("ClosedError: this DistributedDataParallel is closed (")
        assert text.endswith("); make a new one of its module, on a working group")
        assert (lost if how == "in backward" else "broadcast of a tree failed") in text


def test_long_texts_of_errors_are_cut_for_others() -> None:
    def run(group: Any) -> str:
        params = {"w": torch.ones(2)}

        def loss(p: dict[str, Tensor]) -> Tensor:
            if group.rank == BAD:
                raise ValueError("x" * 1_000_000)
            return p["w"].sum()

        with fddp.GradSync(params, group=group) as sync:
            return ending(lambda: sync.value_and_grad(loss)(params)).text

    others, own = fddp.loopback(2, run)
    assert len(own) == 1_000_000
    assert len(others) < 8_300
    cut = "x... (992,012 more characters); no gradients were produced on any rank"
    assert cut in others[8_000:]


def late(rank: int, world_size: int, options: dict[str, Any]) -> Any:
    """Rank 1 runs its second backward pass once the others have given up, and overwritten their
    gradients: those of the first step, and those that there are."""
    ddp = DDP(net(), process_group=impatient(1.0), transport="shm", **options)
    ddp(batch(rank)).sum().backward()
    params = list(ddp.parameters())
    held = [param.grad for param in params]
    ddp.zero_grad(set_to_none=False)
    if rank == BAD:
        dist.barrier()
    error = ending(lambda: ddp(batch(rank)).sum().backward()).kinds[0]
    held += [param.grad for param in params if param.grad is not None]
    for grad in held:
        grad.fill_(7.0)
    if rank != BAD:
        dist.barrier()
    dist.barrier()
    return error, all(bool(grad.eq(7.0).all()) for grad in held)


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}])
def test_a_late_rank_writes_into_no_gradients(ranks: RankPool, options: dict[str, Any]) -> None:
    assert ranks.run(3, late, options) == [("SyncTimeoutError", True)] * 3
