"""Optimizers, trainers, hooks, compilers and copies around a wrapped module: as with stock DDP."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as StockDDP

import tests.support.parity_runs as runs
from tests.support.beside_stock import (
    DDP,
    MLP,
    STEPS,
    Program,
    assert_same_as_stock,
    batches_of,
    renamed,
    training,
)
from tests.support.parity_models import (
    MODELS,
    WIDTH,
    MixedDtypes,
    Model,
    double_layers,
    loss_of,
    mlp,
    rows,
)
from tests.support.ranks import RankPool

CONV = MODELS["conv with batch norm"]
SGD = partial(torch.optim.SGD, lr=0.02)


# Optimizers


def sharded_adam(parameters: Any) -> Any:
    # Where it is imported, torch warns of its own use of torch.jit.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=0.01)


OPTIMIZERS = {
    "SGD, foreach": partial(SGD, momentum=0.9, foreach=True),
    "AdamW, fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "sharded Adam": sharded_adam,
}


def optimized(ddp: DDP, rank: int, name: str, views: bool) -> Iterator[runs.Shot]:
    module = runs.built(MLP, rank)
    model = ddp(module, gradient_as_bucket_view=views)
    return training(model, OPTIMIZERS[name](model.parameters()), batches_of(rank), module)


def converted(ddp: DDP, rank: int, make: Any, **options: Any) -> Iterator[runs.Shot]:
    """Steps before and after the parameters take another memory format.

    After its second forward pass, stock DDP returns gradients whose elements are permuted.
    """
    module = runs.built(CONV, 0)
    model = ddp(module)
    optimizer = make(model.parameters(), lr=0.1, fused=True, **options)
    for step in range(4):
        if step == 1:
            model.to(memory_format=torch.channels_last)
        optimizer.zero_grad(set_to_none=step != 3)
        loss_of(model(CONV.batch(rank, step))).backward()
        yield runs.shot(module)
        optimizer.step()


def scaled(ddp: DDP, rank: int) -> Iterator[Any]:
    """One rank's overflow makes all of them skip the step."""
    module = runs.built(MLP, rank)
    model = ddp(module)
    optimizer = SGD(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scales = []
    for step, batch in enumerate(batches_of(rank)):
        optimizer.zero_grad()
        factor = float("inf") if (rank, step) == (1, 3) else 1.0
        scaler.scale(loss_of(model(batch)) * factor).backward()
        yield {} if step == 3 else runs.shot(module)  # NaN does not compare
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [64.0] * 3 + [32.0] * 3
    yield runs.shot(module)


def autocast_and_clipped(ddp: DDP, rank: int) -> Iterator[runs.Shot]:
    module = runs.built(Model(lambda: mlp().float(), rows), rank)
    model = ddp(module)
    optimizer = SGD(model.parameters())
    for batch in batches_of(rank):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model(batch.float()))
        loss.backward()
        yield runs.shot(module)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
    yield runs.shot(module)


def gradients_in_one_tensor(ddp: DDP, rank: int) -> Iterator[runs.Shot]:
    """Gradients are slices of one tensor, which backward must keep writing."""
    module = runs.built(MLP, rank)
    model = ddp(module)
    parameters = list(module.parameters())
    memory = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    parts = memory.split([p.numel() for p in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter)
    for batch in batches_of(rank):
        memory.zero_()
        loss_of(model(batch)).backward()
        yield {"memory": memory.clone(), **runs.shot(module)}
    storage = memory.untyped_storage().data_ptr()
    assert all(p.grad.untyped_storage().data_ptr() == storage for p in parameters)


def joined_pair(ddp: DDP, rank: int) -> Iterator[runs.Shot]:
    """Two models and a sharded optimizer in one join context."""
    modules = [runs.built(MLP, rank), runs.built(MODELS["frozen layers"], rank)]
    models = [ddp(module) for module in modules]
    optimizer = sharded_adam(models[0].parameters())
    with Join([*models, optimizer]):
        for batch in batches_of(rank)[: STEPS - 3 * rank]:
            optimizer.zero_grad()
            loss_of(models[0](batch)).backward()
            loss_of(models[1](batch)).backward()
            yield {**runs.shot(modules[0]), **renamed(modules[1])}
            optimizer.step()
    yield runs.shot(modules[0])


# Trainers


def recorded(ddp: DDP, rank: int, backward: Callable[[Any, Tensor], None]) -> Iterator[runs.Shot]:
    """Shots after each batch's `backward(model, batch)`; nothing is updated."""
    module = runs.built(MLP, rank)
    model = ddp(module)
    for batch in batches_of(rank):
        model.zero_grad()
        backward(model, batch)
        yield runs.shot(module)


def in_a_thread(model: Any, batch: Tensor) -> None:
    thread = threading.Thread(target=loss_of(model(batch)).backward)
    thread.start()
    thread.join()


def by_functional_call(model: Any, batch: Tensor) -> None:
    """Call the model with the module's own parameters."""
    own = dict(model.named_parameters())
    loss_of(torch.func.functional_call(model, own, (batch,))).backward()


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


def as_accelerate(model: Any, batch: Tensor) -> None:
    """Forwards under `no_sync`; the last backward is set to synchronise."""
    with model.no_sync():
        losses = [loss_of(model(batch)), loss_of(model(batch / 2))]
    with model.no_sync():
        losses[0].backward()
    with sync_in_backward(model):
        losses[1].backward()


def as_lightning(model: Any, batch: Tensor) -> None:
    """Synchronisation is switched by attribute, off in forward and decided before backward, as in
    Lightning's preparation of backward under manual optimization."""
    for is_local in (True, False):
        model.require_backward_grad_sync = False
        loss = loss_of(model(batch))
        model.require_backward_grad_sync = not is_local
        model.require_forward_param_sync = not is_local
        if not is_local:
            assert not model.find_unused_parameters
            assert not model.static_graph
            model.reducer._rebuild_buckets()
            model.reducer.prepare_for_backward([])
        loss.backward()
        model.require_backward_grad_sync = True


# Modules in one another


def chained(ddp: DDP, rank: int) -> Iterator[runs.Shot]:
    """One backward through two wrapped modules."""
    torch.manual_seed(rank)
    generator = nn.Sequential(*double_layers(WIDTH, 8, WIDTH))
    judge = nn.Sequential(*double_layers(WIDTH, 8, 1))
    wrapped = [ddp(generator), ddp(judge)]
    optimizers = [SGD(model.parameters()) for model in wrapped]
    for batch in batches_of(rank):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(wrapped[1](wrapped[0](batch))).backward()
        yield {**runs.shot(generator), **renamed(judge)}
        for optimizer in optimizers:
            optimizer.step()


class Outer(nn.Module):
    """Holds a module that is wrapped itself."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.first(x)))


def nested(ddp: DDP, rank: int) -> Iterator[runs.Shot]:
    torch.manual_seed(rank)
    outer = Outer(ddp(nn.Sequential(*double_layers(WIDTH, 8, 3))))
    StockDDP._set_params_and_buffers_to_ignore_for_model(
        outer, [f"inner.{name}" for name, _ in outer.inner.named_parameters()]
    )
    model = ddp(outer)
    return training(model, SGD(model.parameters()), batches_of(rank), outer)


class CallsItsWrapper(nn.Module):
    """Calls its own wrapper with other parameters before it uses its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.wrapper: list[nn.Module] = []

    def forward(self, x: Tensor, *, again: bool = True) -> Tensor:
        if again:
            other = {"module.weight": torch.zeros(2)}
            torch.func.functional_call(self.wrapper[0], other, (x,), {"again": False})
        return self.weight * x


def called_within_itself(ddp: DDP, rank: int) -> Iterator[runs.Shot]:
    module = CallsItsWrapper()
    module.wrapper.append(model := ddp(module))
    model(torch.full((2,), 1.0 + rank)).sum().backward()
    assert module.weight.grad.tolist() == [1.5, 1.5]
    yield runs.shot(module)


def scripted(ddp: DDP, rank: int, kind: str) -> Iterator[runs.Shot]:
    """Steps of modules that have their parameters in C++."""
    torch.manual_seed(0)
    module = {
        "whole": lambda: torch.jit.script(nn.Linear(3, 2)),
        "part": lambda: nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.Linear(3, 2))),
        "traced": lambda: nn.Sequential(
            torch.jit.trace(nn.Linear(3, 3), torch.ones(1, 3)), nn.Linear(3, 2)
        ),
    }[kind]()
    model = ddp(module)
    optimizer = SGD(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 3), 1.0 + rank + step)).square().sum().backward()
        yield runs.shot(module)
        optimizer.step()


# Hooks, evaluation


def hooked(ddp: DDP, rank: int) -> Iterator[Any]:
    """Hooks change what flows through them, and are called equally often."""
    log: list[str] = []
    module = runs.built(MLP, rank)
    model = ddp(module)

    def noted(name: str, result: Any = None) -> Any:
        def hook(*args: Any) -> Any:
            log.append(name)
            return result(*args) if result else None

        return hook

    for name, target in (("wrapper", model), ("module", module), ("layer", module[2])):
        target.register_forward_pre_hook(noted(f"{name} before forward"))
        target.register_forward_hook(
            noted(f"{name} after forward", lambda module, args, output: output * 1.5)
        )
        target.register_full_backward_pre_hook(noted(f"{name} before backward"))
        target.register_full_backward_hook(noted(f"{name} after backward"))
    module[0].weight.register_hook(noted("gradient", lambda grad: grad.clamp(-1e-3, 1e-3)))
    batches = [batch.requires_grad_() for batch in batches_of(rank)]
    yield from training(model, SGD(model.parameters()), batches, module)
    assert len(log) > 10 * STEPS
    yield log


def inferred(ddp: DDP, rank: int) -> Iterator[Any]:
    """Inference between steps, with buffers."""
    module = runs.built(CONV, rank)
    model = ddp(module)
    optimizer = SGD(model.parameters())
    for step in range(4):
        batch = CONV.batch(rank, step)
        model.eval()
        for context in (torch.inference_mode(), torch.no_grad()):
            with context:
                output = model(batch)
            yield output.is_inference()
            yield {"output": output.clone()}
        model.train()
        yield from training(model, optimizer, [batch], module)


def averaged_on_one_rank(ddp: DDP, rank: int) -> Iterator[Any]:
    """Outputs of an average of the parameters that rank 0 alone evaluates."""
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Sequential(nn.BatchNorm1d(2)))
    model = ddp(module, forward_sync_buffers=False)
    average = None
    for step in range(3):
        model.zero_grad()
        model(torch.full((2, 2), float(step + rank)).cumsum(0)).sum().backward()
        with torch.no_grad():
            if average is None and rank == 0:
                average = copy.deepcopy(model).eval()
            for param in model.parameters():
                param -= 0.1 * param.grad
            if average is not None:
                for param, own in zip(average.parameters(), model.parameters(), strict=True):
                    param.lerp_(own, 0.5)
                yield average(torch.ones(2, 2)).tolist()
        yield runs.shot(module)


def shadowed(ddp: DDP, rank: int) -> Iterator[Any]:
    """Gradients of ranks of which the last has no input."""
    model = ddp(nn.Linear(2, 1, bias=False))
    buckets = model.reducer._get_zeros_like_grad_buckets()
    yield [(b.index(), b.is_last(), b.buffer().tolist()) for b in buckets]
    if rank == 0:
        model(torch.ones(1, 2)).sum().backward()
        yield model.module.weight.grad.tolist()
    else:
        model._match_all_reduce_for_bwd_pass()


# Buckets


def plain_hook(seen, bucket):  # without annotations, which DDP compares as objects
    """Takes the mean, and notes the dtype and the parameters' shapes of each bucket."""
    shapes = [tuple(p.shape) for p in bucket.parameters()]
    seen.append((bucket.index(), bucket.is_last(), bucket.buffer().dtype, shapes))
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


class Layers(nn.Module):
    """Four layers, of these dtypes."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        widths = (6, 9, 4, 5, 3)
        self.layers = nn.ModuleList(
            nn.Linear(before, after, dtype=dtype)
            for before, after, dtype in zip(widths[:-1], widths[1:], dtypes, strict=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x


def first_buckets(ddp: DDP, rank: int, *dtypes: torch.dtype) -> Iterator[Any]:
    """Buckets of the first plan, as a hook sees them."""
    module = Layers(*dtypes) if dtypes else MixedDtypes()
    seen: list[Any] = []
    model = ddp(module)
    model.register_comm_hook(seen, plain_hook)
    loss_of(model(MODELS["mixed dtypes"].batch(rank, 0))).backward()
    yield sorted(seen)
    yield runs.shot(module)


FLOAT, DOUBLE = torch.float32, torch.float64
PROGRAMS: dict[str, Program] = {
    **{
        f"{name}{', views' * views}": partial(optimized, name=name, views=views)
        for name in OPTIMIZERS
        for views in (False, True)
    },
    "channels last, fused SGD": partial(converted, make=torch.optim.SGD, momentum=0.9),
    "channels last, fused Adam": partial(converted, make=torch.optim.Adam),
    "scaled losses": scaled,
    "autocast and clipping": autocast_and_clipped,
    "gradients in one tensor": gradients_in_one_tensor,
    "join of several": joined_pair,
    "backward in a thread": partial(recorded, backward=in_a_thread),
    "functional call": partial(recorded, backward=by_functional_call),
    "Accelerate": partial(recorded, backward=as_accelerate),
    "Lightning": partial(recorded, backward=as_lightning),
    "chained wrappers": chained,
    "nested wrappers": nested,
    "called within itself": called_within_itself,
    "a scripted module": partial(scripted, kind="whole"),
    "a scripted part": partial(scripted, kind="part"),
    "a traced part": partial(scripted, kind="traced"),
    "hooks of modules and parameters": hooked,
    "inference between steps": inferred,
    "one rank evaluates a copy": averaged_on_one_rank,
    "one rank shadows a backward pass": shadowed,
    "first buckets, mixed dtypes": first_buckets,
    "first buckets, one dtype around another": lambda ddp, rank: first_buckets(
        ddp, rank, FLOAT, DOUBLE, DOUBLE, FLOAT
    ),
    "first buckets, dtypes in turn": lambda ddp, rank: first_buckets(
        ddp, rank, *[DOUBLE, FLOAT] * 2
    ),
}


def program(ddp: DDP, rank: int, name: str) -> Iterator[Any]:
    return PROGRAMS[name](ddp, rank)


@pytest.mark.parametrize("name", PROGRAMS)
def test_same_as_stock(ranks: RankPool, name: str) -> None:
    assert_same_as_stock(ranks, partial(program, name=name))
