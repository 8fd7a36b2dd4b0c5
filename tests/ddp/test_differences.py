"""Where fddp's class differs from stock DDP on purpose, warns, or refuses as stock does."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel as StockDDP

import fddp
from tests.support.beside_stock import CLASSES, DDP, assert_same_as_stock
from tests.support.endings import Ending, ending
from tests.support.groups import impatient
from tests.support.ranks import RankPool


def per_class(rank: int, world_size: int, fn: Callable[[DDP, int], Any]) -> list[Any]:
    """Result of stock DDP, then fddp's."""
    return [fn(ddp, rank) for ddp in CLASSES]


def texts_of(call: Callable[[], object]) -> list[str]:
    """Warnings of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in caught]


# Names to ignore, set on a submodule


def ignored_by_a_part(ddp: DDP, rank: int) -> tuple[bool, ...]:
    """Ranks share a gradient of the part, one of another part, and a buffer."""
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Sequential(nn.BatchNorm1d(2)))
    norm = module[1][0]
    norm.running_mean += rank
    StockDDP._set_params_and_buffers_to_ignore_for_model(module[1], ["0.bias", ".0.bias"])
    StockDDP._set_params_and_buffers_to_ignore_for_model(norm, ["running_mean"])
    model = ddp(module.eval())
    (model(torch.rand(4, 2)) * (rank + 1)).sum().backward()
    return tuple(
        is_shared(tensor) for tensor in (norm.bias.grad, module[0].weight.grad, norm.running_mean)
    )


def is_shared(tensor: torch.Tensor) -> bool:
    """All ranks have the same values."""
    tensors: list[Any] = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(tensors, tensor)
    return torch.equal(*tensors)


def test_a_submodule_may_name_what_to_ignore(ranks: RankPool) -> None:
    # Stock reads the names of the wrapped module alone (pytorch#114857).
    for found in ranks.run(2, per_class, ignored_by_a_part):
        assert found == [(True, True, True), (False, True, False)]


# Gradients that are returned


def returned(ddp: DDP, rank: int) -> list[Any]:
    """Errors of `autograd.grad`, and the mean of a backward pass after it."""
    torch.manual_seed(0)
    model = ddp(nn.Linear(2, 1, bias=False))
    x = torch.full((1, 2), rank + 1.0, requires_grad=True)
    params = list(model.parameters())
    kinds = []
    for inputs in ([x], params, [x, *params]):
        loss = model(x).sum()
        end = ending(lambda: torch.autograd.grad(loss, inputs, retain_graph=True))  # noqa: B023
        kinds.append((end.kinds[0], "fddp.GradSync" in end.text))
        with model.no_sync():
            torch.autograd.grad(loss, inputs)
    model(x).sum().backward(inputs=[x])
    model(x).sum().backward(inputs=params)
    return [kinds, x.grad.tolist(), params[0].grad.tolist()]


def test_gradients_of_parameters_are_not_returned_in_silence(ranks: RankPool) -> None:
    for stock, ours in ranks.run(2, per_class, returned):
        (none, *errors), *grads = ours
        assert grads == stock[1:]
        assert none == ("no error", False)
        assert errors == [("TransformError", True)] * 2
        assert {kind for kind, _ in stock[0]} == {"no error"}


def functional(rank: int, world_size: int) -> list[bool]:
    """Calls that warn, with tensors in place of the parameters. Not on threads: levels of
    torch's forward mode are global to a process."""
    model = fddp.DistributedDataParallel(nn.Linear(2, 1, bias=False))
    x = torch.full((1, 2), rank + 1.0)

    def loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, params, (x,)).sum()

    params = {name: param.detach().clone() for name, param in model.named_parameters()}
    leaves = {name: param.clone().requires_grad_() for name, param in params.items()}

    def local() -> None:
        with model.no_sync():
            torch.func.grad(loss)(params)

    calls = (
        lambda: torch.func.grad(loss)(params),
        lambda: torch.func.jvp(loss, (params,), (params,)),
        lambda: loss(leaves),
        lambda: loss(params),
        local,
        lambda: torch.func.grad(lambda y: model(y).sum())(x),
    )
    return [any("fddp.GradSync" in text for text in texts_of(call)) for call in calls]


def test_gradients_of_other_tensors_are_not_local_in_silence(ranks: RankPool) -> None:
    assert ranks.run(2, functional) == [[True, True, True, False, False, False]] * 2


@pytest.mark.slow
def test_hooks_of_dropped_wrappers_do_not_pile_up() -> None:
    """Two for each parameter and wrapper. Those of the wrapper dropped last stay."""

    def run(group: Any) -> list[int]:
        module = nn.Linear(2, 1)
        model = fddp.DistributedDataParallel(module, process_group=group)
        hooks = model.steps.parameters.hooks
        counts = [hooks.hook_count()]
        for _ in range(5):
            other = fddp.DistributedDataParallel(module, process_group=group)
            other(torch.ones(1, 2)).sum().backward()
            del other
            gc.collect()
            counts.append(hooks.hook_count())
        return counts

    assert fddp.loopback(1, run) == [[4, 8, 8, 8, 8, 8]]


class Lazy(nn.Linear):
    def forward(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        out = super().forward(x)
        return lambda: out


def test_outputs_that_hide_their_tensors_bring_a_warning() -> None:
    def run(group: Any) -> list[bool]:
        found = []
        for module, is_grad in ((Lazy(2, 1), True), (Lazy(2, 1), False), (nn.Linear(2, 1), True)):
            model = fddp.DistributedDataParallel(module, process_group=group)
            with torch.set_grad_enabled(is_grad):
                texts = texts_of(partial(model, torch.ones(1, 2)))
            found.append(any("hides its tensors" in text for text in texts))
        return found

    assert fddp.loopback(1, run) == [[True, False, False]]


# Settings and errors


def warned(ddp: DDP, rank: int) -> list[str]:
    module = nn.Linear(2, 2)
    return texts_of(lambda: ddp(module, static_graph=True, find_unused_parameters=True))


def test_a_needless_flag_is_warned_of(ranks: RankPool) -> None:
    for stock, ours in ranks.run(2, per_class, warned):
        assert len(stock) == len(ours) == 1
        assert stock[0].startswith(ours[0].partition(", just")[0])


def test_a_graph_that_does_not_change_may_be_declared_static() -> None:
    def run(group: Any) -> list[int | None]:
        module = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        module.forward = lambda x, used: module[used](x)
        model = fddp.DistributedDataParallel(
            module, process_group=group, find_unused_parameters=True
        )
        seen = [model._get_ddp_logging_data().get("can_set_static_graph")]
        for used in (0, 0, 1):
            model(torch.ones(1, 2), used).sum().backward()
            seen.append(model._get_ddp_logging_data()["can_set_static_graph"])
        return seen

    assert fddp.loopback(2, run) == [[None, 1, 1, 0]] * 2


def with_unused() -> nn.Module:
    """A layer with a further parameter, which its forward does not use."""
    module = nn.Linear(2, 2)
    module.unused = nn.Parameter(torch.ones(2))
    return module


def logged_iteration(model: Any) -> int:
    return int(model._get_ddp_logging_data()["iteration"])


def iterations(ddp: DDP, rank: int) -> Iterator[int]:
    """Logged iterations of steps, of an error between steps, of one in forward, and of the error
    about unused parameters."""
    model = ddp(with_unused(), find_unused_parameters=True)
    model._set_ddp_runtime_logging_sample_rate(1000)
    for _ in range(13):
        model(torch.ones(1, 2)).sum().backward()
    yield logged_iteration(model)
    for _ in range(2):
        with pytest.raises(ValueError, match="wrong"):
            model._log_and_throw(ValueError, "wrong")
        yield logged_iteration(model)
        model(torch.ones(1, 2))
    model = ddp(with_unused())
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        model(torch.ones(1, 2))
    yield logged_iteration(model)


def test_errors_are_logged_with_their_iteration(ranks: RankPool) -> None:
    assert_same_as_stock(ranks, iterations)


def sparse_module(*, is_buffer: bool) -> nn.Module:
    module = nn.Linear(2, 2)
    if is_buffer:
        module.register_buffer("s", torch.eye(2).to_sparse())
    else:
        module.s = nn.Parameter(torch.eye(2).to_sparse())
    return module


def sparse_tensors(ddp: DDP, rank: int) -> list[Ending]:
    """Errors of modules with a sparse parameter, and with a sparse buffer."""
    return [
        ending(lambda: ddp(sparse_module(is_buffer=is_buffer)))  # noqa: B023
        for is_buffer in (False, True)
    ]


def test_sparse_parameters_are_refused(ranks: RankPool) -> None:
    for stock, ours in ranks.run(2, per_class, sparse_tensors):
        for theirs, mine in zip(stock, ours, strict=True):
            assert theirs.text == "No support for sparse tensors."
            assert mine.text.startswith(theirs.text)
            assert "'s' of the module has the layout torch.sparse_coo" in mine.text


def test_modules_that_differ_are_refused_on_all_ranks() -> None:
    def run(group: Any) -> Ending:
        module = nn.Linear(2, 2, bias=group.rank == 0)
        return ending(partial(fddp.DistributedDataParallel, module, process_group=group))

    for end in fddp.loopback(2, run):
        assert "_set_params_and_buffers_to_ignore_for_model of a wrapped module" in end.text
        assert "rank 0 has" in end.text
        assert "rank 1 has" in end.text


def alone(rank: int, world_size: int) -> str:
    """The error of rank 0, which alone synchronises buffers."""
    group = impatient()
    model = fddp.DistributedDataParallel(nn.BatchNorm1d(2), init_sync=False, process_group=group)
    text = ending(lambda: model(torch.ones(2, 2))).text if rank == 0 else ""
    dist.barrier()
    return text


def test_a_wrapper_that_waits_is_named(ranks: RankPool) -> None:
    text, _ = ranks.run(2, alone)
    assert text.startswith("opening a DistributedDataParallel on rank 0 of 2: rank 1 did not open")


def refusals(ddp: DDP, rank: int) -> list[Ending]:
    """Errors at the forward after a step with an unused parameter, and of settings."""
    model = ddp(with_unused())
    model(torch.ones(1, 2)).sum().backward()

    def forward(context: Any) -> None:
        with context:
            model(torch.ones(1, 2))

    other = ddp(nn.Linear(2, 2))
    hook = type(other.join_hook())
    other(torch.ones(1, 2))
    return [
        ending(lambda: forward(torch.no_grad())),
        ending(lambda: forward(model.no_sync())),
        ending(other._set_static_graph),
        ending(lambda: hook(nn.Linear(2, 2), True)),
    ]


def test_what_stock_refuses_is_refused(ranks: RankPool) -> None:
    for stock, ours in ranks.run(2, per_class, refusals):
        assert [end.kinds[0] for end in stock] == [end.kinds[0] for end in ours]
        for text in (
            *("Expected to have finished reduction", "set_static_graph() should be called before"),
            "DDP join hook requires passing in a DistributedDataParallel instance as the state",
        ):
            assert any(text in end.text for end in stock)
            assert any(text in end.text for end in ours)


def warned_of(ddp: DDP, rank: int) -> list[str]:
    """Warnings about the search for unused parameters."""

    def train() -> None:
        model = ddp(nn.Linear(1, 1), find_unused_parameters=True, static_graph=True)
        for _ in range(4):
            model(torch.ones(1, 1)).sum().backward()

    return [text for text in texts_of(train) if "find_unused_parameters" in text]


def test_a_static_graph_that_finds_unused_parameters_warns_once(ranks: RankPool) -> None:
    for stock, ours in ranks.run(2, per_class, warned_of):
        assert [text[:32] for text in stock] == ["You passed find_unused_parameter"]
        assert [text[:32] for text in ours] == ["You passed find_unused_parameter"]


def queued(ddp: DDP, rank: int) -> list[Any]:
    """Gradients that callbacks find which hooks queue in the autograd engine: on the loss, on the
    output, and on the weight."""
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
    return found


def test_callbacks_find_the_mean_if_they_are_queued_behind_an_output(ranks: RankPool) -> None:
    for rank, (stock, ours) in enumerate(ranks.run(2, per_class, queued)):
        assert stock == [1.0 + rank] * 3
        assert ours == [None, 1.5, 1.5]


# Communication hooks


def kept(state, bucket):  # type: ignore[no-untyped-def]  # stock rejects quoted annotations
    """Leave gradients local, and append the buffer to `state`."""
    state.append(bucket.buffer().clone())
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def hooked(ddp: DDP, rank: int) -> list[Any]:
    """What becomes of other strides, uneven inputs and bfloat16."""
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
    grad = uneven.module.weight.grad.item()

    small = ddp(nn.Linear(1, 1, bias=False))
    end = ending(lambda: small.register_comm_hook(None, bf16_compress_hook))
    small(torch.full((1, 1), 2.0 * rank)).sum().backward()
    return [buffers[0].tolist(), grad, end.kinds[0], small.module.weight.grad.item()]


def test_hooks_differ_where_the_page_says_so(ranks: RankPool) -> None:
    for rank, (stock, ours) in enumerate(ranks.run(2, per_class, hooked)):
        assert stock == [[0.0, 2.0, 1.0, 3.0], 2.0 if rank else 4.0, "TypeError", 1.0]
        assert ours == [[0.0, 1.0, 2.0, 3.0], 4.0, "no error", 1.0]
