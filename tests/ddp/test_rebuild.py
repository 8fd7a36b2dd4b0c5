"""Wrapped modules that go on with the ranks that are left."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Linear
from torch.nn.parallel.distributed import _MixedPrecision

import fddp
from tests.support.endings import ending
from tests.support.models import same_bits
from tests.support.polling import LONG_S
from tests.support.ranks import run_fresh

LOST, STEPS = 1, 6


def model_and_optimizer() -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(Linear(3, 4), torch.nn.Tanh(), Linear(4, 1)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def data(rank: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(5, 3, generator=generator, dtype=torch.float64)


def lose_one(rank: int, world_size: int) -> Any:
    """Rank 1 is killed in backward of step 3. The others' step fails, and they take it again."""
    dist.distributed_c10d._set_pg_timeout(dist.distributed_c10d.timedelta(seconds=LONG_S))
    model, optimizer = model_and_optimizer()
    ddp = fddp.DistributedDataParallel(model)
    number, losses, steps = 0, 0, []
    while number < STEPS:
        try:
            optimizer.zero_grad()
            loss = ddp(data(rank, number)).square().mean()
            if (rank, number) == (LOST, 3):
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
        except fddp.RankLostError as error:
            assert error.ranks == (LOST,)  # noqa: PT017
            losses += 1
            ddp.rebuild(optimizer)
            continue
        optimizer.step()
        number += 1
        steps.append(ddp.steps.engine.step)
    total = torch.ones(1)
    dist.all_reduce(total, group=ddp.process_group)
    return [*model.state_dict().values()], losses, steps, total.item()


def in_one_process() -> list[Tensor]:
    model, optimizer = model_and_optimizer()
    for number in range(STEPS):
        ranks = (0, 1, 2) if number < 3 else (0, 2)
        optimizer.zero_grad()
        losses = [model(data(rank, number)).square().mean() for rank in ranks]
        torch.stack(losses).mean().backward()
        optimizer.step()
    return [*model.state_dict().values()]


def test_a_killed_rank() -> None:
    outcomes = run_fresh(3, lose_one)
    assert outcomes[LOST].exitcode == -signal.SIGKILL
    left = [outcomes[rank] for rank in (0, 2)]
    assert [outcome.error for outcome in left] == [None, None]
    assert same_bits([outcome.result[0] for outcome in left])
    for params, losses, steps, total in (outcome.result for outcome in left):
        assert (losses, total) == (1, 2.0)
        assert steps == sorted(set(steps))
        for found, expected in zip(params, in_one_process(), strict=True):
            torch.testing.assert_close(found, expected)


def differ_by_a_step(rank: int, world_size: int) -> Any:
    """Rank 1 has updated once more than rank 0, and rank 2 is killed."""
    dist.distributed_c10d._set_pg_timeout(dist.distributed_c10d.timedelta(seconds=LONG_S))
    model, optimizer = model_and_optimizer()
    ddp = fddp.DistributedDataParallel(model)
    ddp.request_stop()
    ddp(data(0, 0)).sum().backward()
    optimizer.step()
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(fddp.RankLostError):
        ddp(data(0, 1)).sum().backward()
    if rank == 1:  # as if the last collective of this step had ended here
        ddp.steps.engine.finished += 1
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
    ddp.rebuild(optimizer)
    momenta = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
    found = [*model.state_dict().values()], momenta
    ddp(data(0, 1)).sum().backward()
    return found, ddp.steps.engine.step, ddp.stopping


def test_all_take_the_newest_state_in_place() -> None:
    first, second, _ = run_fresh(3, differ_by_a_step)
    assert (first.error, second.error) == (None, None)
    assert same_bits([first.result[0][0], second.result[0][0]])
    assert same_bits([first.result[0][1], second.result[0][1]])
    assert first.result[1:] == second.result[1:]
    assert first.result[2]  # the request is kept


def test_it_is_refused_in_backward() -> None:
    def run(group: Any) -> Any:
        model = Linear(2, 1)
        ddp = fddp.DistributedDataParallel(model, process_group=group)
        output = ddp(torch.ones(1, 2))
        output.register_hook(lambda grad: ddp.rebuild())
        return ending(lambda: output.sum().backward())

    for seen in fddp.loopback(2, run):
        assert "rebuild was called while backward of a step runs" in seen.text


def test_the_weight_of_a_block_is_kept() -> None:
    def run(group: Any) -> Any:
        model = Linear(1, 1, bias=False)
        ddp = fddp.DistributedDataParallel(model, process_group=group)
        batch = torch.full((1 + 2 * group.rank, 1), 1.0 + group.rank)
        ddp(batch).mean().backward()
        means = []
        for _ in range(2):
            with ddp.weighted(len(batch)):
                ddp.rebuild()
                model.weight.grad = None
                ddp(batch).mean().backward()
            assert model.weight.grad is not None
            means.append(model.weight.grad.item())
        return means

    assert fddp.loopback(2, run) == [[1.75, 1.75]] * 2  # (1 + 2 + 2 + 2) / 4


BFLOAT16 = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
OPTIONS: dict[str, dict[str, Any]] = {
    "static graph": {"static_graph": True},
    "views": {"gradient_as_bucket_view": True},
    "mixed precision": {"mixed_precision": BFLOAT16},
    "next report": {"report": "next"},
    "cast": {"hook": fddp.hooks.bf16_compress},
    "error feedback": {"hook": fddp.hooks.error_feedback(fddp.hooks.int8())},
}


def trained(group: Any, options: dict[str, Any], calls: list[str]) -> list[Tensor]:
    """Parameters after six steps, of which the fourth has two micro-batches, and calls before the
    third and within the fourth."""
    model, optimizer = model_and_optimizer()
    for number, param in enumerate(model.parameters()):
        param.data = torch.randn(
            param.shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64
        )
    given = {key: value for key, value in options.items() if key != "hook"}
    ddp = fddp.DistributedDataParallel(model, process_group=group, **given)
    if "hook" in options:
        ddp.register_comm_hook(None, options["hook"])
    for number in range(STEPS):
        if number == 2:
            getattr(ddp, calls[0])()
        optimizer.zero_grad(set_to_none=False)
        if number == 3:
            with ddp.no_sync():
                ddp(data(group.rank, 100)).square().mean().backward()
            getattr(ddp, calls[1])()
        ddp(data(group.rank, number)).square().mean().backward()
        ddp.check()
        optimizer.step()
    return [*model.state_dict().values()]


@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_kept(name: str) -> None:
    """Also between micro-batches. A hook that keeps state begins anew."""
    options = OPTIONS[name]
    plain = fddp.loopback(2, partial(trained, options=options, calls=["check", "check"]))
    found = fddp.loopback(2, partial(trained, options=options, calls=["rebuild", "rebuild"]))
    assert same_bits(found)
    if name == "error feedback":
        for mine, theirs in zip(found[0], plain[0], strict=True):
            torch.testing.assert_close(mine, theirs, atol=0.05, rtol=0.0)
    else:
        assert same_bits([found[0], plain[0]])


def lose_one_of_a_file(rank: int, world_size: int, folder: Path) -> Any:
    """As `lose_one`, in a group whose store is a file."""
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    return lose_one(rank, world_size)


def test_a_killed_rank_of_a_store_in_a_file(tmp_path: Path) -> None:
    outcomes = run_fresh(3, partial(lose_one_of_a_file, folder=tmp_path))
    left = [outcomes[rank] for rank in (0, 2)]
    assert [outcome.error for outcome in left] == [None, None]
    assert same_bits([outcome.result[0] for outcome in left])
    assert [outcome.result[3] for outcome in left] == [2.0, 2.0]


def leave_with_buffers(rank: int, world_size: int) -> Any:
    """Rank 1 has left. Forward passes would wait for its buffers, also those of an evaluation."""
    ddp = fddp.DistributedDataParallel(torch.nn.Sequential(Linear(3, 2), torch.nn.BatchNorm1d(2)))
    if rank == 1:
        ddp.leave()
    ddp(torch.ones(4, 3)).sum().backward()
    texts = []
    for is_training in (False, True):
        with torch.set_grad_enabled(is_training), pytest.raises(fddp.FddpError) as caught:
            ddp(torch.ones(4, 3))
        texts.append(f"{caught.type.__name__} {caught.value}")
    return texts


def test_forward_passes_after_a_leave() -> None:
    other, left = run_fresh(2, leave_with_buffers)
    assert (other.error, left.error) == (None, None)
    assert all("left after the last step, as announced" in text for text in other.result)
    assert all("ClosedError" in text and "this rank has left" in text for text in left.result)


def leave_within_join(rank: int, world_size: int) -> str:
    ddp = fddp.DistributedDataParallel(Linear(3, 2))

    def train() -> None:
        with ddp.join():
            for number in range(2 + rank):
                if number == 1 and rank == 0:
                    ddp.leave()
                ddp(torch.ones(4, 3)).sum().backward()

    with pytest.raises(fddp.FddpError) as caught:
        train()
    return f"{caught.type.__name__} {caught.value}"


def test_a_leave_within_join_ends_the_blocks_of_all_ranks() -> None:
    left, other = run_fresh(2, leave_within_join)
    assert (left.error, other.error) == (None, None)
    assert "ClosedError" in left.result
    assert "this rank has left" in left.result
    assert "RankLostError" in other.result
    assert "rank 0 left after the last step" in other.result
