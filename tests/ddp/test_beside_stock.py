"""Programs beside stock DDP: optimizers, trainers, hooks, modules, errors.

Each runs with either class. What it yields is the same; where the classes differ on purpose, it
states what either gives. `test_parity.py` has the grid of models, arguments and loops.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
)
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as StockDDP

import tests.support.parity_runs as runs
from tests.support.beside_stock import DDP, MLP, STEPS, batches_of, beside_stock, training
from tests.support.endings import ending, warnings_of
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

CONV = MODELS["conv with batch norm"]
SGD = partial(torch.optim.SGD, lr=0.02)


# Optimizers


def sharded_adam(parameters: Any) -> Any:
    # Where it is imported, torch warns of its own use of torch.jit.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=0.01)


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        partial(SGD, momentum=0.9, foreach=True),
        partial(torch.optim.AdamW, lr=0.01, fused=True),
        sharded_adam,
    ],
    ids=["SGD, foreach", "AdamW, fused", "sharded Adam"],
)
@beside_stock()
def test_optimizers(ddp: DDP, rank: int, make: Any, views: bool) -> Iterator[runs.Shot]:
    module = runs.built(MLP, rank)
    model = ddp(module, gradient_as_bucket_view=views)
    yield from training(model, make(model.parameters()), batches_of(rank), module)


@pytest.mark.parametrize(
    "make",
    [partial(torch.optim.SGD, momentum=0.9), torch.optim.Adam],
    ids=["SGD", "Adam"],
)
@beside_stock()
def test_parameters_take_another_memory_format(
    ddp: DDP, rank: int, make: Any
) -> Iterator[runs.Shot]:
    """After its second forward pass, stock DDP returns gradients whose elements are permuted."""
    module = runs.built(CONV, 0)
    model = ddp(module)
    optimizer = make(model.parameters(), lr=0.1, fused=True)
    for step in range(4):
        if step == 1:
            model.to(memory_format=torch.channels_last)
        optimizer.zero_grad(set_to_none=step != 3)
        loss_of(model(CONV.batch(rank, step))).backward()
        yield runs.shot(module)
        optimizer.step()


@beside_stock()
def test_scaled_losses(ddp: DDP, rank: int) -> Iterator[Any]:
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


@beside_stock()
def test_autocast_and_clipping(ddp: DDP, rank: int) -> Iterator[runs.Shot]:
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


@beside_stock()
def test_gradients_in_one_tensor(ddp: DDP, rank: int) -> Iterator[runs.Shot]:
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


def renamed(module: nn.Module) -> runs.Shot:
    return {f"second {path}": tensor for path, tensor in runs.shot(module).items()}


@beside_stock()
def test_two_models_and_a_sharded_optimizer_join(ddp: DDP, rank: int) -> Iterator[runs.Shot]:
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


def in_a_thread(model: Any, batch: Tensor) -> None:
    thread = threading.Thread(target=loss_of(model(batch)).backward)
    thread.start()
    thread.join()


def by_functional_call(model: Any, batch: Tensor) -> None:
    """Call the model with the module's own parameters."""
    own = dict(model.named_parameters())
    loss_of(torch.func.functional_call(model, own, (batch,))).backward()


def as_accelerate(model: Any, batch: Tensor) -> None:
    """Forwards under `no_sync`; the last backward is set to synchronise, as by Accelerate's
    `trigger_sync_in_backward`."""
    with model.no_sync():
        losses = [loss_of(model(batch)), loss_of(model(batch / 2))]
    with model.no_sync():
        losses[0].backward()
    before = model.require_backward_grad_sync, model.require_forward_param_sync
    model.require_backward_grad_sync = model.require_forward_param_sync = True
    model.reducer.prepare_for_backward([])
    losses[1].backward()
    model.require_backward_grad_sync, model.require_forward_param_sync = before


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


@pytest.mark.parametrize("backward", [in_a_thread, by_functional_call, as_accelerate, as_lightning])
@beside_stock()
def test_trainers(
    ddp: DDP, rank: int, backward: Callable[[Any, Tensor], None]
) -> Iterator[runs.Shot]:
    module = runs.built(MLP, rank)
    model = ddp(module)
    for batch in batches_of(rank):
        model.zero_grad()
        backward(model, batch)
        yield runs.shot(module)


# Modules in one another


@beside_stock()
def test_one_backward_through_two_wrappers(ddp: DDP, rank: int) -> Iterator[runs.Shot]:
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


@beside_stock()
def test_a_wrapper_in_a_wrapped_module(ddp: DDP, rank: int) -> Iterator[runs.Shot]:
    torch.manual_seed(rank)
    outer = Outer(ddp(nn.Sequential(*double_layers(WIDTH, 8, 3))))
    StockDDP._set_params_and_buffers_to_ignore_for_model(
        outer, [f"inner.{name}" for name, _ in outer.inner.named_parameters()]
    )
    model = ddp(outer)
    yield from training(model, SGD(model.parameters()), batches_of(rank), outer)


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


@beside_stock()
def test_a_wrapper_called_within_itself(ddp: DDP, rank: int) -> Iterator[runs.Shot]:
    module = CallsItsWrapper()
    module.wrapper.append(model := ddp(module))
    model(torch.full((2,), 1.0 + rank)).sum().backward()
    assert module.weight.grad.tolist() == [1.5, 1.5]
    yield runs.shot(module)


@pytest.mark.parametrize("kind", ["whole", "part", "traced"])
@beside_stock()
def test_modules_with_parameters_in_cpp(ddp: DDP, rank: int, kind: str) -> Iterator[runs.Shot]:
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


# Hooks of modules, evaluation


@beside_stock()
def test_hooks_of_modules_and_parameters(ddp: DDP, rank: int) -> Iterator[Any]:
    """They change what flows through them, and are called equally often."""
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


@beside_stock()
def test_inference_between_steps(ddp: DDP, rank: int) -> Iterator[Any]:
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


@beside_stock()
def test_one_rank_evaluates_an_average_of_the_parameters(ddp: DDP, rank: int) -> Iterator[Any]:
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


@beside_stock()
def test_one_rank_shadows_a_backward_pass(ddp: DDP, rank: int) -> Iterator[Any]:
    model = ddp(nn.Linear(2, 1, bias=False))
    buckets = model.reducer._get_zeros_like_grad_buckets()
    yield [(b.index(), b.is_last(), b.buffer().tolist()) for b in buckets]
    if rank == 0:
        model(torch.ones(1, 2)).sum().backward()
        yield model.module.weight.grad.tolist()
    else:
        model._match_all_reduce_for_bwd_pass()


# Buckets, communication hooks


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


FLOAT, DOUBLE = torch.float32, torch.float64


@pytest.mark.parametrize(
    "dtypes",
    [(), (FLOAT, DOUBLE, DOUBLE, FLOAT), (DOUBLE, FLOAT) * 2],
    ids=["mixed", "one around another", "in turn"],
)
@beside_stock()
def test_first_buckets(ddp: DDP, rank: int, dtypes: tuple[torch.dtype, ...]) -> Iterator[Any]:
    """Buckets of the first plan, as a hook that takes the mean sees them."""

    def mean(state, bucket):  # type: ignore[no-untyped-def]  # stock rejects quoted annotations
        shapes = [tuple(p.shape) for p in bucket.parameters()]
        seen.append((bucket.index(), bucket.is_last(), bucket.buffer().dtype, shapes))
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    module = Layers(*dtypes) if dtypes else MixedDtypes()
    seen: list[Any] = []
    model = ddp(module)
    model.register_comm_hook(None, mean)
    loss_of(model(MODELS["mixed dtypes"].batch(rank, 0))).backward()
    yield sorted(seen)
    yield runs.shot(module)


def local_after_two_steps(model: Any) -> None:
    alone, _ = dist.new_subgroups(1)
    state = post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=2)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)


def doubled(state, bucket):  # type: ignore[no-untyped-def]  # stock rejects quoted annotations
    """A hook that replaces the buffer of each bucket, and writes the old one."""
    future: Any = torch.futures.Future()
    future.set_result(bucket.buffer() * 2)
    bucket.buffer().zero_()
    return future


REGISTER: dict[str, Callable[[Any], None]] = {
    "all-reduce": lambda model: model.register_comm_hook(None, default_hooks.allreduce_hook),
    "no-op": lambda model: model.register_comm_hook(None, debugging_hooks.noop_hook),
    "local SGD": local_after_two_steps,
    "doubled": lambda model: model.register_comm_hook(None, doubled),
}


@pytest.mark.parametrize("hook", REGISTER)
@beside_stock()
def test_hooks_of_sparse_gradients(ddp: DDP, rank: int, hook: str) -> Iterator[runs.Shot]:
    """Two of the three buckets are sparse."""
    sparse = MODELS["sparse embedding"]
    module = runs.built(sparse, rank)
    model = ddp(module)
    REGISTER[hook](model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model(sparse.batch(rank, step))).backward()
        for table in (module.embedding.weight, module.bag.weight):
            table.grad = table.grad.coalesce()  # ours is
        yield runs.shot(module)
        optimizer.step()


@beside_stock()
def test_hooks_see_the_same_of_sparse_and_dense_buckets(ddp: DDP, rank: int) -> Iterator[Any]:
    seen: list[Any] = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # stock rejects quoted annotations
        buffer, (param, *_) = bucket.buffer(), bucket.parameters()
        numbers = buffer.to_dense() if buffer.is_sparse else buffer
        views = [view.tolist() for view in bucket.gradients()]
        seen.append((param.shape, buffer.is_sparse, numbers.tolist(), views))
        return debugging_hooks.noop_hook(state, bucket)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(2, 4, sparse=True)
            self.image = nn.Conv2d(2, 3, (1, 2), bias=False)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.image(self.table(words).view(1, 2, 1, 2)).sum()

    model = ddp(Both())
    model.register_comm_hook(None, hook)
    model(torch.tensor([rank])).backward()
    yield sorted(seen, key=str)
    yield runs.shot(model.module)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@beside_stock(3)
def test_builtin_float16(ddp: DDP, rank: int, dtype: torch.dtype) -> Iterator[runs.Shot]:
    module = runs.built(Model(lambda: mlp().to(dtype), rows), rank)
    model = ddp(module) if ddp is StockDDP else ddp(module, transport="c10d")
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    batches = [rows(rank, step).to(dtype) for step in range(STEPS)]
    yield from training(model, torch.optim.SGD(model.parameters(), lr=0.1), batches, module)


@beside_stock()
def test_builtin_float16_within_join(ddp: DDP, rank: int) -> Iterator[runs.Shot]:
    model = ddp(nn.Linear(1, 1, bias=False))
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    with model.join(divide_by_initial_world_size=False):
        for step in range(1 + rank):
            model.zero_grad()
            model(torch.full((1, 1), 0.1 + step)).sum().backward()
            yield runs.shot(model.module) if rank else {}


@beside_stock()
def test_hooks_differ_in_strides_uneven_inputs_and_bfloat16(ddp: DDP, rank: int) -> None:
    def kept(state, bucket):  # type: ignore[no-untyped-def]  # stock rejects quoted annotations
        state.append(bucket.buffer().clone())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    buffers: list[torch.Tensor] = []
    image = nn.Conv2d(2, 1, (1, 2), bias=False).to(memory_format=torch.channels_last)
    model = ddp(image)
    model.register_comm_hook(buffers, kept)
    model(torch.arange(4.0).view(1, 2, 1, 2)).sum().backward()

    uneven = ddp(nn.Linear(1, 1, bias=False))
    uneven._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    with uneven.join(divide_by_initial_world_size=False):
        for _ in range(1 + rank):
            uneven.zero_grad()
            uneven(torch.full((1, 1), 4.0)).sum().backward()

    small = ddp(nn.Linear(1, 1, bias=False))
    end = ending(lambda: small.register_comm_hook(None, default_hooks.bf16_compress_hook))
    small(torch.full((1, 1), 2.0 * rank)).sum().backward()
    assert small.module.weight.grad.item() == 1.0

    order, grad = buffers[0].tolist(), uneven.module.weight.grad.item()
    if ddp is StockDDP:
        assert order == [0.0, 2.0, 1.0, 3.0]
        assert (grad, end.kinds[0]) == (2.0 if rank else 4.0, "TypeError")
    else:
        assert order == [0.0, 1.0, 2.0, 3.0]
        assert (grad, end.kinds[0]) == (4.0, "no error")


# Gradients that are returned or seen early


@beside_stock()
def test_gradients_of_parameters_are_not_returned_in_silence(ddp: DDP, rank: int) -> Iterator[Any]:
    model = ddp(nn.Linear(2, 1, bias=False))
    x = torch.full((1, 2), rank + 1.0, requires_grad=True)
    params = list(model.parameters())
    for inputs, refuses in (([x], False), (params, True), ([x, *params], True)):
        loss = model(x).sum()
        end = ending(lambda: torch.autograd.grad(loss, inputs, retain_graph=True))  # noqa: B023
        if refuses and ddp is not StockDDP:
            assert end.kinds[0] == "TransformError"
            assert "fddp.GradSync" in end.text
        else:
            assert end.kinds[0] == "no error"
        with model.no_sync():
            torch.autograd.grad(loss, inputs)
    model(x).sum().backward(inputs=[x])
    model(x).sum().backward(inputs=params)
    yield [x.grad.tolist(), params[0].grad.tolist()]


@beside_stock()
def test_callbacks_find_the_mean_if_they_are_queued_behind_an_output(ddp: DDP, rank: int) -> None:
    """Callbacks that hooks queue in the autograd engine: on the loss, the output, the weight."""
    model = ddp(nn.Linear(1, 1, bias=False))
    weight, found = model.module.weight, []

    def queue(grad: torch.Tensor) -> None:
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: found.append(weight.grad and weight.grad.item()))

    for tensor in range(3):
        weight.grad = None
        output = model(torch.full((1, 1), 1.0 + rank))
        loss = output * 1.0
        handle = (loss, output, weight)[tensor].register_hook(queue)
        loss.sum().backward()
        handle.remove()
    assert found == ([1.0 + rank] * 3 if ddp is StockDDP else [None, 1.5, 1.5])


# Settings, warnings, errors


@beside_stock()
def test_a_submodule_may_name_what_to_ignore(ddp: DDP, rank: int) -> None:
    """Stock reads the names of the wrapped module alone (pytorch#114857)."""
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Sequential(nn.BatchNorm1d(2)))
    norm = module[1][0]
    norm.running_mean += rank
    StockDDP._set_params_and_buffers_to_ignore_for_model(module[1], ["0.bias", ".0.bias"])
    StockDDP._set_params_and_buffers_to_ignore_for_model(norm, ["running_mean"])
    model = ddp(module.eval())
    (model(torch.rand(4, 2)) * (rank + 1)).sum().backward()
    shared = []
    for tensor in (norm.bias.grad, module[0].weight.grad, norm.running_mean):
        tensors: list[Any] = [torch.empty_like(tensor) for _ in range(2)]
        dist.all_gather(tensors, tensor)
        shared.append(torch.equal(*tensors))
    assert shared == ([True, True, True] if ddp is StockDDP else [False, True, False])


@beside_stock()
def test_a_needless_flag_is_warned_of(ddp: DDP, rank: int) -> Iterator[Any]:
    module = nn.Linear(2, 2)
    (text,) = warnings_of(lambda: ddp(module, static_graph=True, find_unused_parameters=True))
    yield text.partition(", just")[0]


@beside_stock()
def test_a_static_graph_that_finds_unused_parameters_warns_once(
    ddp: DDP, rank: int
) -> Iterator[Any]:
    def train() -> None:
        model = ddp(nn.Linear(1, 1), find_unused_parameters=True, static_graph=True)
        for _ in range(4):
            model(torch.ones(1, 1)).sum().backward()

    (text,) = [text for text in warnings_of(train) if "find_unused_parameters" in text]
    yield text[:32]


def with_unused() -> nn.Module:
    """A layer with a further parameter, which its forward does not use."""
    module = nn.Linear(2, 2)
    module.unused = nn.Parameter(torch.ones(2))
    return module


@beside_stock()
def test_errors_are_logged_with_their_iteration(ddp: DDP, rank: int) -> Iterator[Any]:
    """After steps, an error between steps, one in forward, and that about unused parameters."""

    def logged() -> int:
        return int(model._get_ddp_logging_data()["iteration"])

    model = ddp(with_unused(), find_unused_parameters=True)
    model._set_ddp_runtime_logging_sample_rate(1000)
    for _ in range(13):
        model(torch.ones(1, 2)).sum().backward()
    yield logged()
    for _ in range(2):
        with pytest.raises(ValueError, match="wrong"):
            model._log_and_throw(ValueError, "wrong")
        yield logged()
        model(torch.ones(1, 2))
    model = ddp(with_unused())
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        model(torch.ones(1, 2))
    yield logged()


@pytest.mark.parametrize("is_buffer", [False, True])
@beside_stock()
def test_sparse_tensors_are_refused(ddp: DDP, rank: int, is_buffer: bool) -> Iterator[Any]:
    module = nn.Linear(2, 2)
    if is_buffer:
        module.register_buffer("s", torch.eye(2).to_sparse())
    else:
        module.s = nn.Parameter(torch.eye(2).to_sparse())
    text = ending(lambda: ddp(module)).text
    yield text[: len("No support for sparse tensors.")]
    assert ddp is StockDDP or "'s' of the module has the layout torch.sparse_coo" in text


@beside_stock()
def test_what_stock_refuses_is_refused(ddp: DDP, rank: int) -> Iterator[Any]:
    """With an error of the same kind, and torch's text in it."""
    model = ddp(with_unused())
    model(torch.ones(1, 2)).sum().backward()

    def forward(context: Any) -> None:
        with context:
            model(torch.ones(1, 2))

    other = ddp(nn.Linear(2, 2))
    hook = type(other.join_hook())
    other(torch.ones(1, 2))
    for call, text in (
        (lambda: forward(torch.no_grad()), ""),
        (lambda: forward(model.no_sync()), "Expected to have finished reduction"),
        (other._set_static_graph, "set_static_graph() should be called before"),
        (
            lambda: hook(nn.Linear(2, 2), True),
            "DDP join hook requires passing in a DistributedDataParallel instance as the state",
        ),
    ):
        end = ending(call)
        yield end.kinds[0]
        assert text in end.text if text else end.kinds == ("no error",)
