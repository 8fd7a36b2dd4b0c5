"""A wrapped module with optimizers, scalers, compilers and trainers: as with stock DDP."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as StockDDP

import tests.support.parity_runs as runs
from tests.support.parity_models import MODELS, WIDTH, Model, double_layers, loss_of, mlp, rows
from tests.support.ranks import RankPool
from tests.support.twin_runs import (
    DDP,
    MLP,
    STEPS,
    assert_no_difference,
    batches_of,
    both,
    recorded,
    renamed,
    train_with,
    trained,
)

# Optimizers and loops


OPTIMIZERS = {
    "SGD, foreach": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, foreach=True),
    "SGD, fused": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, fused=True),
    "Adam, foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "sharded Adam": lambda p: sharded_adam(p),
}


def sharded_adam(parameters: Any) -> Any:
    # Where it is imported, torch warns of its own use of torch.jit.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=0.01)


def optimized(rank: int, world_size: int, name: str, views: bool) -> str:
    return both(lambda ddp: trained(ddp, rank, OPTIMIZERS[name], gradient_as_bucket_view=views))


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(ranks: RankPool, name: str, views: bool) -> None:
    assert_no_difference(ranks.run(2, optimized, name, views))


def scaled(rank: int, world_size: int) -> tuple[str, list[float]]:
    scales = []

    def run(ddp: DDP) -> list[runs.Shot]:
        module = runs.built(MLP, rank)
        model = ddp(module)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        shots = []
        scales.clear()
        for step, batch in enumerate(batches_of(MLP, rank)):
            optimizer.zero_grad()
            factor = float("inf") if (rank, step) == (1, 4) else 1.0
            scaler.scale(loss_of(model(batch)) * factor).backward()
            shots.append({} if step == 4 else runs.shot(module))  # NaN does not compare
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return [*shots, runs.shot(module)]

    return both(run), scales


def test_grad_scaler(ranks: RankPool) -> None:
    # One rank's overflow makes all of them skip the step.
    for difference, scales in ranks.run(2, scaled):
        assert difference == ""
        assert scales == [64.0] * 4 + [32.0] * 4


def autocast(rank: int, world_size: int) -> str:
    def run(ddp: DDP) -> list[runs.Shot]:
        module = runs.built(Model(lambda: mlp().float(), rows), rank)
        model = ddp(module)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        shots = []
        for batch in batches_of(MLP, rank):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model(batch.float()))
            loss.backward()
            shots.append(runs.shot(module))
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
        return [*shots, runs.shot(module)]

    return both(run)


def test_autocast_and_clipping(ranks: RankPool) -> None:
    assert_no_difference(ranks.run(2, autocast))


def flat(rank: int, world_size: int) -> tuple[str, bool]:
    """Gradients are slices of one tensor, which backward must keep writing."""
    kept = []

    def run(ddp: DDP) -> list[runs.Shot]:
        module = runs.built(MLP, rank)
        model = ddp(module)
        parameters = list(module.parameters())
        memory = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
        for parameter, part in zip(
            parameters, memory.split([p.numel() for p in parameters]), strict=True
        ):
            parameter.grad = part.view_as(parameter)
        shots = []
        for batch in batches_of(MLP, rank):
            memory.zero_()
            loss_of(model(batch)).backward()
            shots.append({"memory": memory.clone(), **runs.shot(module)})
        storage = memory.untyped_storage().data_ptr()
        kept.append(all(p.grad.untyped_storage().data_ptr() == storage for p in parameters))
        return shots

    return both(run), all(kept)


def test_gradients_in_one_tensor(ranks: RankPool) -> None:
    assert ranks.run(2, flat) == [("", True)] * 2


def threaded(rank: int, world_size: int) -> str:
    """Run every backward in a thread of its own."""

    def backward(model: Any, batch: Tensor) -> None:
        thread = threading.Thread(target=loss_of(model(batch)).backward)
        thread.start()
        thread.join()

    return both(lambda ddp: recorded(ddp, rank, backward))


def test_backward_in_a_thread(ranks: RankPool) -> None:
    assert_no_difference(ranks.run(2, threaded))


# Compiled


# Large enough for several buckets, between which dynamo then splits the graph.
WIDE = Model(lambda: nn.Sequential(*double_layers(WIDTH, 512, 512, 512, 3)), rows)


def compiled(rank: int, world_size: int, outside: bool) -> str:
    def wrap(ddp: DDP, module: nn.Module) -> Any:
        if outside:
            return torch.compile(ddp(module, bucket_cap_mb=1), backend="aot_eager")
        return ddp(torch.compile(module, backend="aot_eager"), bucket_cap_mb=1)

    def run(ddp: DDP) -> list[runs.Shot]:
        torch._dynamo.reset()
        module = runs.built(WIDE, rank)
        model = wrap(ddp, module)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        shots = [runs.shot(module) for _ in train_with(model, optimizer, batches_of(MLP, rank))]
        return [*shots, runs.shot(module)]

    return both(run)


@pytest.mark.parametrize("outside", [True, False])
def test_compiled(ranks: RankPool, outside: bool) -> None:
    assert_no_difference(ranks.run(2, compiled, outside, timeout_s=100.0))


# What trainers touch


@contextlib.contextmanager
def sync_in_backward(model: Any) -> Iterator[None]:
    """The effect of Accelerate's `trigger_sync_in_backward` on a DDP object."""
    before = model.require_backward_grad_sync, model.require_forward_param_sync
    model.require_backward_grad_sync = model.require_forward_param_sync = True
    model.reducer.prepare_for_backward([])
    try:
        yield
    finally:
        model.require_backward_grad_sync, model.require_forward_param_sync = before


def accelerated(rank: int, world_size: int) -> str:
    """Forwards under `no_sync`; the last backward is set to synchronise."""

    def run(ddp: DDP) -> list[runs.Shot]:
        module = runs.built(MLP, rank)
        model = ddp(module)
        assert isinstance(model, StockDDP)
        assert model.module is module
        shots = []
        for batch in batches_of(MLP, rank):
            with model.no_sync():
                losses = [loss_of(model(batch)), loss_of(model(batch / 2))]
            with model.no_sync():
                losses[0].backward()
            with sync_in_backward(model):
                losses[1].backward()
            shots.append(runs.shot(module))
            model.zero_grad()
        return shots

    return both(run)


def test_accelerate(ranks: RankPool) -> None:
    assert_no_difference(ranks.run(2, accelerated))


def prepared(model: Any) -> None:
    """Lightning's preparation of backward under manual optimization."""
    if not (torch.is_grad_enabled() and model.require_backward_grad_sync):
        model.require_forward_param_sync = False
        return
    model.require_forward_param_sync = True
    assert not model.find_unused_parameters
    assert not model.static_graph
    model.reducer._rebuild_buckets()
    model.reducer.prepare_for_backward([])


def lightning(rank: int, world_size: int) -> str:
    """Synchronisation is switched by attribute: off in forward, and decided before backward."""

    def run(ddp: DDP) -> list[runs.Shot]:
        module = runs.built(MLP, rank)
        model = ddp(module=module, device_ids=None)
        shots = []
        for step, batch in enumerate(batches_of(MLP, rank)):
            model.require_backward_grad_sync = False
            loss = loss_of(model(batch))
            model.require_backward_grad_sync = True
            if step % 2 == 0:
                model.require_backward_grad_sync = False
            prepared(model)
            loss.backward()
            model.require_backward_grad_sync = True
            if step % 2:
                shots.append(runs.shot(module))
                model.zero_grad()
        return shots

    return both(run)


def test_lightning(ranks: RankPool) -> None:
    assert_no_difference(ranks.run(2, lightning))


def joined_pair(rank: int, world_size: int) -> str:
    """Two models and a sharded optimizer in one join context."""

    def run(ddp: DDP) -> list[runs.Shot]:
        modules = [runs.built(MLP, rank), runs.built(MODELS["frozen layers"], rank)]
        models = [ddp(module) for module in modules]
        optimizer = sharded_adam(models[0].parameters())
        shots = []
        with Join([*models, optimizer]):
            for batch in batches_of(MLP, rank)[: STEPS - 3 * rank]:
                optimizer.zero_grad()
                loss_of(models[0](batch)).backward()
                loss_of(models[1](batch)).backward()
                shots.append({**runs.shot(modules[0]), **renamed(modules[1])})
                optimizer.step()
        return [*shots, runs.shot(modules[0])]

    return both(run)


def test_join_of_several(ranks: RankPool) -> None:
    assert_no_difference(ranks.run(2, joined_pair))
