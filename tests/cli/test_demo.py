"""The demo, whole and in parts: real processes, short runs."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import fddp
from fddp.cli import common, launch
from fddp.cli.demo.command import run_demo
from fddp.cli.demo.data import Batch, load, own_batches, whole_batches
from fddp.cli.demo.model import Params, Score, init_params, loss_fn
from fddp.cli.demo.report import ROUNDING, Report, checks
from fddp.cli.demo.train import (
    Options,
    Trained,
    difference,
    difference_between_ranks,
    train,
    train_alone,
)
from fddp.cli.progress import Stages
from tests.support import commands as cli

if TYPE_CHECKING:
    from tests.support.ranks import RankPool

GOOD = Report(
    ranks=2,
    epochs=1,
    images=1437,
    steps=24,
    transport="c10d",
    score=Score(loss=0.5, accuracy=0.9),
    between_ranks=0.0,
    from_one_process=1e-15,
    bucket_bytes=(1024,),
    hidden=0.5,
)


def train_unweighted(
    params: Params,
    data: Batch,
    sync: fddp.GradSync,
    epochs: int,
    after_epoch: Callable[[Params], None],
) -> Trained:
    """The demo's loop, but each rank counts the same however many images it has."""
    infos = []
    step = sync.value_and_grad(loss_fn, with_info=True)
    for batch in fddp.uneven(own_batches(data, 0, sync.rank, sync.world_size), sync):
        _, grads, info = step(params, batch)
        params = fddp.tree_map(lambda p, g: p - 0.1 * g, params, grads)
        infos.append(info)
    after_epoch(params)
    return Trained(params, infos)


@pytest.mark.slow
def test_the_command_trains_and_shows_every_row(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--epochs", "1", "--bucket-cap-mb", "0.1"]) == 0
    printed = capfd.readouterr().out
    words = " ".join(printed.split())
    for row in (
        "1437 digits, epochs: 1, ranks: 2, transport: shm",
        "loss on held-out images",
        "accuracy on held-out images",
        "difference between ranks 0 passed: must be 0",
        "difference from one process",
        "passed: at most 1e-10",
        "buckets",
        "communication hidden",
    ):
        assert row in words
    # Away from a terminal, progress is lines.
    assert "training on all ranks: loss " in printed
    assert "\x1b" not in printed


@pytest.mark.nightly
def test_wrong_gradients_end_with_a_failed_check(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_demo(Options(2, 1, 0.25, train_unweighted)) == 1
    printed = capfd.readouterr().out
    assert "passed: must be 0" in printed  # wrong, but the same on all ranks
    assert "FAILED: at most 1e-10" in printed


def train_dies(params: Params, data: Batch, sync: fddp.GradSync, *rest: object) -> Trained:
    """Fails on one rank before its first step."""
    if sync.rank == 1:
        raise RuntimeError("out of luck")
    return Trained(params, [])


@pytest.mark.nightly
def test_a_rank_that_fails_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run_demo(Options(2, 1, 0.25, train_dies))
    assert caught.value.code == 1
    printed = capfd.readouterr().err
    assert printed.index("rank 1 failed:\n") < printed.index("RuntimeError: out of luck")
    assert printed.endswith("fddp demo: a rank failed; its error is above\n")


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (
            ChildFailedError("rank", {0: ProcessFailure(0, 1, 1, "no file")}),
            1,
            "fddp demo: a rank failed; its error is above\n",
        ),
        (SignalException("ended", signal.SIGTERM), 143, "fddp demo: ended by SIGTERM\n"),
    ],
    ids=["failed", "ended by a signal"],
)
def test_ends_of_ranks_are_those_of_the_command(
    error: Exception,
    code: int,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def launch_fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(common, "launch", launch_fails)
    with pytest.raises(SystemExit) as caught:
        run_demo(Options(2, 1, 0.25))
    assert (caught.value.code, capsys.readouterr().err) == (code, text)


def test_one_rank_shows_its_progress(capsys: pytest.CaptureFixture[str]) -> None:
    for shown in (True, False):
        with Stages(shown=shown) as stages:
            stages.begin("counting", 1)
            stages.advance()
            stages.note("[1] of 1")
    assert capsys.readouterr().out == "counting\ncounting: [1] of 1\n"


@pytest.mark.parametrize("value", [math.nan, math.inf, 2 * ROUNDING, 1e-16])
def test_ranks_must_not_differ_and_one_process_by_rounding_only(value: float) -> None:
    assert all(check.passed for check in checks(GOOD).values())
    found = checks(replace(GOOD, between_ranks=value))["difference between ranks"]
    assert not found.passed
    assert str(found) == "FAILED: must be 0"
    found = checks(replace(GOOD, from_one_process=value))["difference from one process"]
    assert found.passed == (value == 1e-16)


AMOUNTS = [0.0, 1e-14, 0.5, float("nan")]


def _part_from_rank_0(rank: int, world_size: int) -> list[float]:
    differences = []
    for amount in AMOUNTS:
        params = init_params(seed=0)
        if rank == world_size - 1:
            params["dense2"]["bias"][3] += amount
        differences.append(difference_between_ranks(params))
    return differences


def test_a_diverged_rank_is_reported_on_all(ranks: RankPool) -> None:
    for differences in ranks.run(3, _part_from_rank_0):
        assert differences == pytest.approx(AMOUNTS, rel=1e-3, abs=0.0, nan_ok=True)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_the_ranks_together_take_each_image_once_an_epoch(world_size: int) -> None:
    data, held_out = load()
    assert data.size + held_out.size == 1797
    numbered = Batch(torch.arange(data.size), data.labels)
    own = [list(own_batches(numbered, 1, rank, world_size)) for rank in range(world_size)]
    whole = list(whole_batches(numbered, 1, world_size))
    assert torch.equal(
        torch.cat([batch.images for batch in whole]).sort()[0], torch.arange(data.size)
    )
    assert len(whole) == max(map(len, own))
    for number, batch in enumerate(whole):
        parts = [batches[number].images for batches in own if number < len(batches)]
        assert torch.equal(batch.images, torch.cat(parts))


def _train_few(group: fddp.transport.LoopbackGroup, data: Batch) -> Trained:
    params = fddp.broadcast(init_params(seed=group.rank), group=group)
    with fddp.GradSync(params, group=group, bucket_cap_mb=0.1) as sync:
        return train(params, data, sync, 2, lambda params: None)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_loop_is_that_of_one_process(world_size: int) -> None:
    data = load()[0].pick(slice(200))
    trained = fddp.loopback(world_size, _train_few, data)
    alone = train_alone(init_params(seed=0), data, world_size, 2, lambda: None)
    assert difference(alone, init_params(seed=0)) > 0.01
    for params, infos in trained:
        assert difference(params, alone) <= 1e-12
        assert difference(params, trained[0].params) == 0.0
        # Every image counted once in each epoch, whoever had it.
        assert sum(info.total_weight for info in infos) == 2 * data.size
    if world_size > 1:
        assert min(info.active for info in trained[0].infos) < world_size


def test_handlers_of_signals_are_the_callers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting ranks leaves the process that starts them as it was."""

    def elastic_launch(config: Any, entrypoint: Any) -> Callable[..., dict[int, int]]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as torch's launcher does, with its own
        return lambda backend, fn, *args: {0: fn(*args)}

    monkeypatch.setattr(launch, "elastic_launch", elastic_launch)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        assert launch.launch(1, os.getpid) == [os.getpid()]
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)
