"""DistributedDataParallel beside the rest of torch: the bits of stock DDP, or of the module."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parallel import DistributedDataParallel as StockDDP

import fddp
import parity_runs as runs
from parity_models import (
    MODELS,
    ROWS,
    WIDTH,
    Model,
    double_layers,
    loss_of,
    mlp,
    rows,
)
from ranks import RankPool

STEPS = 8
MLP = MODELS["mlp"]
DDP = Callable[..., Any]


def batches_of(model: Model, rank: int, steps: int = STEPS) -> list[Tensor]:
    return [model.batch(rank, step) for step in range(steps)]


def train(model: Any, optimizer: Any, batches: Sequence[Tensor]) -> Iterator[None]:
    """As `runs.plain`, with any optimizer."""
    return runs.plain(runs.Run(model, optimizer), batches)


def trained(ddp: DDP, rank: int, make_optimizer: Any, **arguments: Any) -> list[runs.Shot]:
    module = runs.built(MLP, rank)
    model = ddp(module, **arguments)
    loop = train(model, make_optimizer(model.parameters()), batches_of(MLP, rank))
    return [*(runs.shot(module) for _ in loop), runs.shot(module)]


def both(fn: Callable[[DDP], list[runs.Shot]]) -> str:
    """Where a run with stock DDP and one with fddp's part."""
    return runs.first_difference(fn(StockDDP), fn(fddp.DistributedDataParallel))


def assert_no_difference(differences: list[str]) -> None:
    assert differences == [""] * len(differences)


# Optimizers

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
    """Gradients are slices of one tensor, which backward must go on writing."""
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
    """Every backward runs in a thread of its own."""

    def run(ddp: DDP) -> list[runs.Shot]:
        module = runs.built(MLP, rank)
        model = ddp(module)
        shots = []
        for batch in batches_of(MLP, rank):
            model.zero_grad()
            loss = loss_of(model(batch))
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
            shots.append(runs.shot(module))
        return shots

    return both(run)


def test_backward_in_a_thread(ranks: RankPool) -> None:
    assert_no_difference(ranks.run(2, threaded))


# Saving and copying


def checkpointed(rank: int, world_size: int, directory: str) -> str:
    """Half a run with one class, and the rest with each of them, from the same files."""

    def start(ddp: DDP, seed: int) -> tuple[nn.Module, Any, Any]:
        module = runs.built(MLP, seed)
        model = ddp(module)
        return module, model, torch.optim.Adam(model.parameters(), lr=0.01)

    batches = batches_of(MLP, rank)
    _, model, optimizer = start(fddp.DistributedDataParallel, rank)
    list(train(model, optimizer, batches[:4]))
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
        shots = [runs.shot(module) for _ in train(model, optimizer, batches[4:])]
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
        list(train(first, optimizer, batches_of(MLP, rank, 3)))
        optimizer.zero_grad()
        second = COPIES[name](first)
        own = {id(parameter) for parameter in first.parameters()}
        shared.append(any(id(parameter) in own for parameter in second.parameters()))
        optimizer = torch.optim.SGD(second.parameters(), lr=0.02)
        shots = [runs.shot(second.module) for _ in train(second, optimizer, batches_of(MLP, rank))]
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
        shots = [runs.shot(module) for _ in train(model, optimizer, batches_of(MLP, rank))]
        return [*shots, runs.shot(module)]

    return both(run)


@pytest.mark.parametrize("outside", [True, False])
def test_compiled(ranks: RankPool, outside: bool) -> None:
    assert_no_difference(ranks.run(2, compiled, outside, timeout_s=100.0))


# What trainers touch


@contextlib.contextmanager
def sync_in_backward(model: Any) -> Iterator[None]:
    """What Accelerate's `trigger_sync_in_backward` does to a DDP object."""
    before = model.require_backward_grad_sync, model.require_forward_param_sync
    model.require_backward_grad_sync = model.require_forward_param_sync = True
    model.reducer.prepare_for_backward([])
    try:
        yield
    finally:
        model.require_backward_grad_sync, model.require_forward_param_sync = before


def accelerated(rank: int, world_size: int) -> str:
    """Forwards under `no_sync`; the last backward is told to synchronise."""

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
    """What Lightning does between forward and backward where users step optimizers themselves."""
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
                shots.append({**runs.shot(modules[0]), **_renamed(modules[1])})
                optimizer.step()
        return [*shots, runs.shot(modules[0])]

    return both(run)


def _renamed(module: nn.Module) -> runs.Shot:
    return {f"second {path}": tensor for path, tensor in runs.shot(module).items()}


def test_join_of_several(ranks: RankPool) -> None:
    assert_no_difference(ranks.run(2, joined_pair))


# Several wrappers


class Outer(nn.Module):
    """Holds a module that is wrapped itself."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.first(x)))


def chained(rank: int, world_size: int) -> str:
    """One backward through two wrapped modules."""

    def run(ddp: DDP) -> list[runs.Shot]:
        torch.manual_seed(rank)
        generator = nn.Sequential(*double_layers(WIDTH, 8, WIDTH))
        judge = nn.Sequential(*double_layers(WIDTH, 8, 1))
        wrapped = [ddp(generator), ddp(judge)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.02) for model in wrapped]
        shots = []
        for batch in batches_of(MLP, rank):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(wrapped[1](wrapped[0](batch))).backward()
            shots.append({**runs.shot(generator), **_renamed(judge)})
            for optimizer in optimizers:
                optimizer.step()
        return shots

    return both(run)


def nested(rank: int, world_size: int) -> str:
    def run(ddp: DDP) -> list[runs.Shot]:
        torch.manual_seed(rank)
        inner = nn.Sequential(*double_layers(WIDTH, 8, 3))
        outer = Outer(ddp(inner))
        StockDDP._set_params_and_buffers_to_ignore_for_model(
            outer, [f"inner.{name}" for name, _ in outer.inner.named_parameters()]
        )
        model = ddp(outer)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        loop = train(model, optimizer, batches_of(MLP, rank))
        return [*(runs.shot(outer) for _ in loop), runs.shot(outer)]

    return both(run)


@pytest.mark.parametrize("fn", [chained, nested])
def test_several_wrappers(ranks: RankPool, fn: Any) -> None:
    assert_no_difference(ranks.run(2, fn))


# Hooks of modules and parameters


def hooked(rank: int, world_size: int) -> tuple[str, bool]:
    """Hooks change what flows through them, and are called equally often."""
    calls: dict[bool, list[str]] = {}

    def run(ddp: DDP) -> list[runs.Shot]:
        log = calls.setdefault(ddp is StockDDP, [])
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
        module[2].weight.register_post_accumulate_grad_hook(noted("accumulated"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        batches = [batch.requires_grad_() for batch in batches_of(MLP, rank)]
        return [runs.shot(module) for _ in train(model, optimizer, batches)]

    difference = both(run)
    return difference, calls[True] == calls[False] and len(calls[True]) > 10 * STEPS


def test_module_and_parameter_hooks(ranks: RankPool) -> None:
    assert ranks.run(2, hooked) == [("", True)] * 2


# torch.func


class Scaled(nn.Module):
    """A layer and a buffer, which stock DDP would write in place in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2, dtype=torch.float64)
        self.register_buffer("scale", torch.tensor(2.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) * self.scale


TRANSFORMS: dict[str, Callable[[Any, Tensor], Any]] = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x / 2,)),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones(ROWS, 2, dtype=x.dtype)),
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x).square().sum())(x),
    "grad of parameters": lambda f, x: tuple(
        torch.func.grad(lambda p: torch.func.functional_call(f, p, (x,)).square().sum())(
            {name: p.detach() for name, p in f.named_parameters()}
        ).values()
    ),
}


def transformed(rank: int, world_size: int, name: str) -> tuple[float, float]:
    """How far the wrapper is from the module, and a step after it from one process."""
    torch.manual_seed(0)
    module = Scaled()
    model = fddp.DistributedDataParallel(module)
    x = rows(rank, 0)
    theirs, ours = (_leaves(TRANSFORMS[name](f, x)) for f in (module, model))
    apart = max(float((a - b).abs().max()) for a, b in zip(theirs, ours, strict=True))

    alone = copy.deepcopy(module)
    torch.stack([loss_of(alone(rows(r, 1))) for r in range(world_size)]).mean().backward()
    loss_of(model(rows(rank, 1))).backward()
    gap = (module.layer.weight.grad - alone.layer.weight.grad).abs().max()
    return apart, float(gap)


def _leaves(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(ranks: RankPool, name: str) -> None:
    for apart, gap in ranks.run(2, transformed, name):
        assert apart < 1e-12
        assert gap < 1e-12


def called_functionally(rank: int, world_size: int) -> str:
    """Through `functional_call` with the module's own parameters."""

    def run(ddp: DDP) -> list[runs.Shot]:
        module = runs.built(MLP, rank)
        model = ddp(module)
        shots = []
        for batch in batches_of(MLP, rank):
            model.zero_grad()
            own = dict(model.named_parameters())
            loss_of(torch.func.functional_call(model, own, (batch,))).backward()
            shots.append(runs.shot(module))
        return shots

    return both(run)


def test_functional_call(ranks: RankPool) -> None:
    assert_no_difference(ranks.run(2, called_functionally))


# Without gradients


def inferred(rank: int, world_size: int) -> tuple[str, bool]:
    outputs = []

    def run(ddp: DDP) -> list[runs.Shot]:
        model_case = MODELS["conv with batch norm"]
        module = runs.built(model_case, rank)
        model = ddp(module)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        shots = []
        for step in range(4):
            batch = model_case.batch(rank, step)
            model.eval()
            with torch.inference_mode():
                outputs.append(model(batch))
            with torch.no_grad():
                outputs.append(model(batch))
            model.train()
            shots += [runs.shot(module) for _ in train(model, optimizer, [batch])]
        return shots

    difference = both(run)
    stock, ours = outputs[: len(outputs) // 2], outputs[len(outputs) // 2 :]
    return difference, all(
        torch.equal(a, b) and a.is_inference() == b.is_inference()
        for a, b in zip(stock, ours, strict=True)
    )


def test_inference_between_steps(ranks: RankPool) -> None:
    assert ranks.run(2, inferred) == [("", True)] * 2


# Life


def alive_after(rank: int, world_size: int, views: bool, finished: bool) -> list[str]:
    """What is still alive after `del`, without the garbage collector."""
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
