"""A wrapped module that is saved, loaded, copied and released: as with stock DDP."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parallel import DistributedDataParallel as StockDDP

import fddp
import tests.support.parity_runs as runs
from tests.support.parity_models import MODELS, loss_of
from tests.support.ranks import RankPool
from tests.support.twin_runs import DDP, MLP, assert_no_difference, batches_of, both, train_with

# Saving and copying


def checkpointed(rank: int, world_size: int, directory: str) -> str:
    """Half a run with one class, and the rest with each of them, from the same files."""

    def start(ddp: DDP, seed: int) -> tuple[nn.Module, Any, Any]:
        module = runs.built(MLP, seed)
        model = ddp(module)
        return module, model, torch.optim.Adam(model.parameters(), lr=0.01)

    batches = batches_of(MLP, rank)
    _, model, optimizer = start(fddp.DistributedDataParallel, rank)
    list(train_with(model, optimizer, batches[:4]))
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    assert all(not path.startswith("module.") for path in state["model"])
    dcp.save(state, checkpoint_id=directory)

    def resume(ddp: DDP) -> list[runs.Shot]:
        module, model, optimizer = start(ddp, rank + 7)
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(state, checkpoint_id=directory)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        shots = [runs.shot(module) for _ in train_with(model, optimizer, batches[4:])]
        return [*shots, runs.shot(module)]

    return both(resume)


def test_distributed_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    assert_no_difference(ranks.run(2, checkpointed, str(tmp_path)))


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": lambda model: _saved(model),
}


def _saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def copied(rank: int, world_size: int, name: str) -> tuple[str, bool]:
    shared = []

    def run(ddp: DDP) -> list[runs.Shot]:
        first = ddp(runs.built(MLP, rank), gradient_as_bucket_view=True)
        optimizer = torch.optim.SGD(first.parameters(), lr=0.02)
        list(train_with(first, optimizer, batches_of(MLP, rank, 3)))
        optimizer.zero_grad()
        second = COPIES[name](first)
        own = {id(parameter) for parameter in first.parameters()}
        shared.append(any(id(parameter) in own for parameter in second.parameters()))
        optimizer = torch.optim.SGD(second.parameters(), lr=0.02)
        shots = [
            runs.shot(second.module) for _ in train_with(second, optimizer, batches_of(MLP, rank))
        ]
        # The first one still works.
        loss_of(first(MLP.batch(rank, 5))).backward()
        return [*shots, runs.shot(first.module)]

    return both(run), any(shared)


@pytest.mark.parametrize("name", COPIES)
def test_copies_train_on(ranks: RankPool, name: str) -> None:
    for difference, shared in ranks.run(2, copied, name):
        assert difference == ""
        assert not shared


def states(rank: int, world_size: int) -> tuple[list[str], list[str], bool, bool]:
    module = runs.built(MODELS["conv with batch norm"], rank)
    model = fddp.DistributedDataParallel(module)
    state = model.state_dict()
    paths = list(state)
    stripped = dict(state)
    consume_prefix_in_state_dict_if_present(stripped, "module.")
    other = runs.built(MODELS["conv with batch norm"], 9)
    other.load_state_dict(stripped)
    back = StockDDP(runs.built(MODELS["conv with batch norm"], 11))
    back.load_state_dict(state)
    model.load_state_dict(back.state_dict())
    return (
        paths,
        [name for name, _ in model.named_parameters()],
        not runs.first_difference([runs.shot(module)], [runs.shot(other)]),
        not runs.first_difference([runs.shot(module)], [runs.shot(back.module)]),
    )


def test_state_dict(ranks: RankPool) -> None:
    module = runs.built(MODELS["conv with batch norm"], 0)
    for paths, names, stripped, stock in ranks.run(2, states):
        assert paths == [f"module.{path}" for path in module.state_dict()]
        assert names == [f"module.{path}" for path, _ in module.named_parameters()]
        assert stripped
        assert stock


# Letting go


def alive_after(rank: int, world_size: int, views: bool, finished: bool) -> list[str]:
    """Return the objects that are still alive after `del`, without the garbage collector."""
    # The first step of a process imports much, in frames that refer to what it was given.
    warm = torch.zeros(1, requires_grad=True)
    warm.sum().backward()
    torch.optim.SGD([warm], lr=0.02).step()
    gc.collect()
    gc.disable()
    try:
        module = runs.built(MLP, rank)
        model = fddp.DistributedDataParallel(module, gradient_as_bucket_view=views)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        for batch in batches_of(MLP, rank, 4):
            optimizer.zero_grad()
            loss = loss_of(model(batch))
            loss.backward()
            optimizer.step()
        output = model(batch)
        if finished:
            loss_of(output).backward()
        refs = {
            "wrapper": weakref.ref(model),
            "module": weakref.ref(module),
            "parameter": weakref.ref(module[2].weight),
            "gradient": weakref.ref(module[2].weight.grad),
            "output": weakref.ref(output),
        }
        del model, module, optimizer, loss, batch, output
        return [name for name, ref in refs.items() if ref() is not None]
    finally:
        gc.enable()


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("finished", [True, False])
def test_no_leaks(ranks: RankPool, views: bool, finished: bool) -> None:
    assert ranks.run(2, alive_after, views, finished) == [[], []]


def module_outlives(rank: int, world_size: int) -> str:
    """Without its wrapper a module has local gradients, and can be wrapped again."""

    def run(ddp: DDP) -> list[runs.Shot]:
        module = runs.built(MLP, rank)
        model = ddp(module)
        loss_of(model(MLP.batch(rank, 0))).backward()
        del model
        gc.collect()
        module.zero_grad()
        loss_of(module(MLP.batch(rank, 1))).backward()
        shots = [runs.shot(module)]
        module.zero_grad()
        again = ddp(module, bucket_cap_mb=1e-4)
        loss_of(again(MLP.batch(rank, 2))).backward()
        return [*shots, runs.shot(module)]

    return both(run)


def test_module_without_its_wrapper(ranks: RankPool) -> None:
    assert_no_difference(ranks.run(2, module_outlives))
