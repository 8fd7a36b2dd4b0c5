"""A wrapped module that is saved, loaded, copied and released: as with stock DDP."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import pickle
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parallel import DistributedDataParallel as StockDDP

import fddp
import tests.support.parity_runs as runs
from tests.support.beside_stock import DDP, MLP, batches_of, beside_stock, training
from tests.support.groups import rank_of
from tests.support.on_ranks import on_processes
from tests.support.parity_models import MODELS, loss_of

# Saving and copying


@beside_stock()
def test_distributed_checkpoint(ddp: DDP, rank: int, tmp_path: Path) -> Iterator[runs.Shot]:
    """Half a run with fddp's class, saved, and the rest of it with either class."""

    def start(ddp: DDP, seed: int) -> tuple[nn.Module, Any, Any, dict[str, Any]]:
        module = runs.built(MLP, seed)
        model = ddp(module)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        states = zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)
        return module, model, optimizer, dict(states)

    module, model, optimizer, _ = start(fddp.DistributedDataParallel, rank)
    list(training(model, optimizer, batches_of(rank)[:3], module))
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    assert all(not path.startswith("module.") for path in state["model"])
    folder = str(tmp_path / ddp.__module__)  # type: ignore[attr-defined]
    dcp.save(state, checkpoint_id=folder)

    module, model, optimizer, state = start(ddp, rank + 7)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    yield from training(model, optimizer, batches_of(rank)[3:], module)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": lambda model: _saved(model),
    "older state": lambda model: _of_older_state(model),
}


def _saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _of_older_state(model: nn.Module) -> nn.Module:
    """A copy from a state without the attributes that older versions lack."""
    state = copy.deepcopy(model.__getstate__())
    for name in ("require_forward_param_sync", "require_backward_grad_sync", "_switch"):
        state.pop(name, None)
    again = type(model).__new__(type(model))
    again.__setstate__(state)
    return again


@pytest.mark.parametrize("name", COPIES)
@beside_stock()
def test_copies_train_on(ddp: DDP, rank: int, name: str) -> Iterator[runs.Shot]:
    first = ddp(runs.built(MLP, rank), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(first.parameters(), lr=0.02)
    list(training(first, optimizer, batches_of(rank, 3), first.module))
    optimizer.zero_grad()
    second = COPIES[name](first)
    own = {id(parameter) for parameter in first.parameters()}
    assert not any(id(parameter) in own for parameter in second.parameters())
    optimizer = torch.optim.SGD(second.parameters(), lr=0.02)
    yield from training(second, optimizer, batches_of(rank), second.module)
    # The first one still works.
    loss_of(first(MLP.batch(rank, 5))).backward()
    yield runs.shot(first.module)


@on_processes(2)
def test_state_dict(rank: int, world_size: int) -> None:
    """State goes from fddp's class to a plain module and to stock DDP, and back."""
    conv = MODELS["conv with batch norm"]
    module, other, third = (runs.built(conv, seed) for seed in (rank, 9, 11))
    model, back = fddp.DistributedDataParallel(module), StockDDP(third)
    assert isinstance(model, StockDDP)
    state = model.state_dict()
    assert [*state] == [f"module.{path}" for path in module.state_dict()]
    names = [f"module.{path}" for path, _ in module.named_parameters()]
    assert [path for path, _ in model.named_parameters()] == names
    stripped = dict(state)
    consume_prefix_in_state_dict_if_present(stripped, "module.")
    other.load_state_dict(stripped)
    back.load_state_dict(state)
    model.load_state_dict(back.state_dict())
    for copied in (other, third):
        assert not runs.first_difference([runs.shot(module)], [runs.shot(copied)])


# Letting go


def alive_after(group: Any, views: bool, finished: bool) -> list[str]:
    """Return the objects that are still alive after `del`, without the garbage collector."""
    module = runs.built(MLP, 0)
    model = fddp.DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=views)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for batch in batches_of(rank_of(group), 4):
        optimizer.zero_grad()
        loss = loss_of(model(batch))
        loss.backward()
        optimizer.step()
    output = model(batch)
    if finished:
        loss_of(output).backward()
    refs = {
        "wrapper": weakref.ref(model),
        "steps": weakref.ref(model.steps),
        "module": weakref.ref(module),
        "parameter": weakref.ref(module[2].weight),
        "gradient": weakref.ref(module[2].weight.grad),
        "output": weakref.ref(output),
    }
    del model, module, optimizer, loss, batch, output
    return [name for name, ref in refs.items() if ref() is not None]


@on_processes(2)
def test_wrappers_are_freed_without_the_garbage_collector(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    # The first step of a process imports much, in frames that refer to what it was given.
    alive_after(group, False, True)
    gc.collect()
    gc.disable()
    try:
        ways = itertools.product((False, True), repeat=2)
        assert not [name for way in ways for name in alive_after(group, *way)]
    finally:
        gc.enable()


@beside_stock()
def test_module_without_its_wrapper(ddp: DDP, rank: int) -> Iterator[runs.Shot]:
    """It has local gradients, and can be wrapped again."""
    module = runs.built(MLP, rank)
    model = ddp(module)
    loss_of(model(MLP.batch(rank, 0))).backward()
    del model
    gc.collect()
    module.zero_grad()
    loss_of(module(MLP.batch(rank, 1))).backward()
    yield runs.shot(module)
    module.zero_grad()
    again = ddp(module, bucket_cap_mb=1e-4)
    loss_of(again(MLP.batch(rank, 2))).backward()
    yield runs.shot(module)
