"""Programs that run with stock DDP and with fddp, and what each of the two does."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel as StockDDP

import fddp
from tests.support.endings import Ending, ending
from tests.support.ranks import RankPool

CLASSES = (StockDDP, fddp.DistributedDataParallel)

# Names to ignore, set on a submodule


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2, bias=False), nn.Sequential(nn.BatchNorm1d(2)))


def ignored_by_a_part(rank: int, world_size: int) -> list[tuple[bool, bool, bool]]:
    """Per class: ranks share a gradient of the part, one of another part, and a buffer."""
    found = []
    for wrapped in CLASSES:
        torch.manual_seed(rank)
        module = two_layers()
        norm = module[1][0]
        norm.running_mean += rank
        StockDDP._set_params_and_buffers_to_ignore_for_model(module[1], ["0.bias", ".0.bias"])
        StockDDP._set_params_and_buffers_to_ignore_for_model(norm, ["running_mean"])
        model = wrapped(module.eval())
        (model(torch.rand(4, 2)) * (rank + 1)).sum().backward()
        tensors = (norm.bias.grad, module[0].weight.grad, norm.running_mean)
        found.append(tuple(is_shared(tensor) for tensor in tensors))
    return found


def is_shared(tensor: torch.Tensor) -> bool:
    """All ranks have the same values."""
    tensors: list[Any] = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(tensors, tensor)
    return torch.equal(*tensors)


def test_a_submodule_may_name_what_to_ignore(ranks: RankPool) -> None:
    # Stock reads the names of the wrapped module alone (pytorch#114857).
    stock, ours = (True, True, True), (False, True, False)
    for found in ranks.run(2, ignored_by_a_part):
        assert found == [stock, ours]


# Copies


def averaged_on_one_rank(rank: int, world_size: int, arguments: dict[str, Any]) -> list[Any]:
    """Per class: outputs of an average of the parameters that rank 0 alone evaluates."""
    found = []
    for wrapped in CLASSES:
        torch.manual_seed(0)
        model = wrapped(two_layers(), **arguments)
        seen: list[Any] = []
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
                    seen.append(average(torch.ones(2, 2)).tolist())
        found.append([seen, [param.tolist() for param in model.parameters()]])
    return found


def test_one_rank_evaluates_a_copy(ranks: RankPool) -> None:
    for stock, ours in ranks.run(2, averaged_on_one_rank, {"forward_sync_buffers": False}):
        assert ours == stock


def alone(rank: int, world_size: int) -> str:
    """The error of rank 0, which alone synchronises buffers."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    model = fddp.DistributedDataParallel(two_layers(), init_sync=False, process_group=group)
    text = ""
    if rank == 0:
        with torch.no_grad(), pytest.raises(fddp.SyncTimeoutError) as caught:
            model(torch.ones(2, 2))
        text = str(caught.value)
    dist.barrier()
    return text


def test_a_wrapper_that_waits_is_named(ranks: RankPool) -> None:
    text, _ = ranks.run(2, alone)
    assert text.startswith("opening a DistributedDataParallel on rank 0 of 2: rank 1 did not open")


# Gradients that are returned


def returned(rank: int, world_size: int) -> list[Any]:
    """Per class: errors of `autograd.grad`, and the mean of a backward pass after it."""
    found = []
    for wrapped in CLASSES:
        torch.manual_seed(0)
        model = wrapped(nn.Linear(2, 1, bias=False))
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
        found.append((kinds, x.grad.tolist(), params[0].grad.tolist()))
    return found


def test_gradients_of_parameters_are_not_returned_in_silence(ranks: RankPool) -> None:
    for stock, ours in ranks.run(2, returned):
        (none, *errors), *grads = ours
        assert grads == [*stock[1:]]
        assert none == ("no error", False)
        assert errors == [("TransformError", True)] * 2
        assert {kind for kind, _ in stock[0]} == {"no error"}


def functional(rank: int, world_size: int) -> list[bool]:
    """Which calls warn, with tensors in place of the parameters."""
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
    found = []
    for call in calls:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        found.append(any("fddp.GradSync" in str(warning.message) for warning in caught))
    return found


def test_gradients_of_other_tensors_are_not_local_in_silence(ranks: RankPool) -> None:
    assert ranks.run(2, functional) == [[True, True, True, False, False, False]] * 2


def dropped(rank: int, world_size: int) -> list[int]:
    """Hooks on the parameters of a wrapper, before and after others of its module come and go."""
    module = nn.Linear(2, 1)
    model = fddp.DistributedDataParallel(module)
    hooks = model.steps.runner.parameters.hooks
    counts = [hooks.hook_count()]
    for _ in range(5):
        fddp.DistributedDataParallel(module)(torch.ones(1, 2)).sum().backward()
        gc.collect()
        counts.append(hooks.hook_count())
    return counts


def test_hooks_of_dropped_wrappers_do_not_pile_up(ranks: RankPool) -> None:
    # Two for each parameter and wrapper. Those of the wrapper dropped last stay.
    assert ranks.run(2, dropped) == [[4, 8, 8, 8, 8, 8]] * 2


class Lazy(nn.Linear):
    def forward(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        out = super().forward(x)
        return lambda: out


def hidden(rank: int, world_size: int) -> list[bool]:
    """Which modules warn that their outputs can't be seen."""
    found = []
    for module, is_grad_enabled in (
        (Lazy(2, 1), True),
        (Lazy(2, 1), False),
        (nn.Linear(2, 1), True),
    ):
        model = fddp.DistributedDataParallel(module)
        with (
            warnings.catch_warnings(record=True) as caught,
            torch.set_grad_enabled(is_grad_enabled),
        ):
            warnings.simplefilter("always")
            model(torch.ones(1, 2))
        found.append(any("hides its tensors" in str(warning.message) for warning in caught))
    return found


def test_outputs_that_hide_their_tensors_bring_a_warning(ranks: RankPool) -> None:
    assert ranks.run(2, hidden) == [[True, False, False]] * 2


# Settings


def warned(rank: int, world_size: int) -> list[list[str]]:
    """Per class: the beginning of the warnings of the constructor."""
    found = []
    for wrapped in CLASSES:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            wrapped(nn.Linear(2, 2), static_graph=True, find_unused_parameters=True)
        found.append([str(warning.message).partition(", just")[0] for warning in caught])
    return found


def test_a_needless_flag_is_warned_of(ranks: RankPool) -> None:
    for stock, ours in ranks.run(2, warned):
        assert len(stock) == len(ours) == 1
        assert stock[0].startswith(ours[0])


def statics(rank: int, world_size: int) -> list[int | None]:
    """What may be set after steps of a graph that did not change, and of one that did."""
    seen = []
    module = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    module.forward = lambda x, used: module[used](x)
    model = fddp.DistributedDataParallel(module, find_unused_parameters=True)
    seen.append(model._get_ddp_logging_data().get("can_set_static_graph"))
    for used in (0, 0, 1):
        model(torch.ones(1, 2), used).sum().backward()
        seen.append(model._get_ddp_logging_data()["can_set_static_graph"])
    return seen


def test_a_graph_that_does_not_change_may_be_declared_static(ranks: RankPool) -> None:
    assert ranks.run(2, statics) == [[None, 1, 1, 0]] * 2


# Shadowing


def shadowed(rank: int, world_size: int) -> list[list[Any]]:
    """Per class: gradients of ranks of which the last has no input."""
    found = []
    for wrapped in CLASSES:
        model = wrapped(nn.Linear(2, 1, bias=False))
        buckets = model.reducer._get_zeros_like_grad_buckets()
        zeros = [(b.index(), b.is_last(), b.buffer().tolist()) for b in buckets]
        if rank == 0:
            model(torch.ones(1, 2)).sum().backward()
            zeros.append(model.module.weight.grad.tolist())
        else:
            model._match_all_reduce_for_bwd_pass()
        found.append(zeros)
    return found


def test_a_rank_shadows_a_backward_pass(ranks: RankPool) -> None:
    for stock, ours in ranks.run(2, shadowed):
        assert ours == stock


# Errors


def with_unused() -> nn.Module:
    """A layer with a further parameter, which its forward does not use."""
    module = nn.Linear(2, 2)
    module.unused = nn.Parameter(torch.ones(2))
    return module


def iterations(rank: int, world_size: int) -> list[list[int]]:
    """Per class: logged iterations of steps, of an error between steps, and of one in forward."""
    found = []
    for wrapped in CLASSES:
        model = wrapped(with_unused(), find_unused_parameters=True)
        model._set_ddp_runtime_logging_sample_rate(1000)
        for _ in range(13):
            model(torch.ones(1, 2)).sum().backward()
        seen = [logged_iteration(model)]
        with pytest.raises(ValueError, match="wrong"):
            model._log_and_throw(ValueError, "wrong")
        seen.append(logged_iteration(model))
        model(torch.ones(1, 2))
        with pytest.raises(ValueError, match="wrong"):
            model._log_and_throw(ValueError, "wrong")
        found.append([*seen, logged_iteration(model)])
    return found


def logged_iteration(model: Any) -> int:
    return int(model._get_ddp_logging_data()["iteration"])


@pytest.mark.filterwarnings("ignore:find_unused_parameters=True")
def test_an_error_is_logged_with_its_iteration(ranks: RankPool) -> None:
    for stock, ours in ranks.run(2, iterations):
        assert stock == ours == [10, 13, 14]


def unused_iteration(rank: int, world_size: int) -> list[int]:
    """Per class: the logged iteration of the error about unused parameters."""
    found = []
    for wrapped in CLASSES:
        model = wrapped(with_unused())
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
            model(torch.ones(1, 2))
        found.append(logged_iteration(model))
    return found


def test_the_error_about_unused_parameters_is_logged_with_its_iteration(ranks: RankPool) -> None:
    assert ranks.run(2, unused_iteration) == [[2, 2], [2, 2]]


def sparse_module(rank: int, *, is_buffer: bool, only: bool) -> nn.Module:
    module = nn.Linear(2, 2)
    values = torch.eye(2) if only and rank == 0 else torch.eye(2).to_sparse()
    if is_buffer:
        module.register_buffer("s", values)
    else:
        module.s = nn.Parameter(values)
    return module


def sparse_tensors(rank: int, world_size: int) -> list[list[Ending]]:
    """Per class: errors of modules with a sparse parameter, and with a sparse buffer."""
    return [
        [
            ending(lambda: wrapped(sparse_module(rank, is_buffer=is_buffer, only=False)))  # noqa: B023
            for is_buffer in (False, True)
        ]
        for wrapped in CLASSES
    ]


def test_sparse_parameters_are_refused(ranks: RankPool) -> None:
    for stock, ours in ranks.run(2, sparse_tensors):
        for theirs, mine in zip(stock, ours, strict=True):
            assert theirs.text == "No support for sparse tensors."
            assert mine.text.startswith(theirs.text)
            assert "'s' of the module has the layout torch.sparse_coo" in mine.text


def sparse_on_one(rank: int, world_size: int) -> Ending:
    module = sparse_module(rank, is_buffer=True, only=True)
    return ending(lambda: fddp.DistributedDataParallel(module))


def test_a_tensor_that_is_sparse_on_one_rank_is_refused_on_all(ranks: RankPool) -> None:
    for end in ranks.run(2, sparse_on_one):
        assert end.kinds[0] == "PlanMismatchError"
        assert "and torch.float32 (2, 2), torch.sparse_coo on rank 1" in end.text


def uneven_modules(rank: int, world_size: int) -> str:
    return ending(lambda: fddp.DistributedDataParallel(nn.Linear(2, 2, bias=rank == 0))).text


def test_advice_for_modules_that_differ_fits_the_wrapper(ranks: RankPool) -> None:
    for text in ranks.run(2, uneven_modules):
        assert "_set_params_and_buffers_to_ignore_for_model of a wrapped module" in text


def refusals(rank: int, world_size: int) -> list[list[Ending]]:
    """Per class: errors at the forward after a step with an unused parameter, and of settings."""
    found = []
    for wrapped in CLASSES:
        model = wrapped(with_unused())
        model(torch.ones(1, 2)).sum().backward()

        def forward(context: Any) -> None:
            with context:
                model(torch.ones(1, 2))  # noqa: B023

        other = wrapped(nn.Linear(2, 2))
        hook = type(other.join_hook())
        other(torch.ones(1, 2))
        found.append(
            [
                ending(lambda: forward(torch.no_grad())),
                ending(lambda: forward(model.no_sync())),  # noqa: B023
                ending(other._set_static_graph),
                ending(lambda: hook(nn.Linear(2, 2), True)),  # noqa: B023
            ]
        )
    return found


def test_what_stock_refuses_is_refused(ranks: RankPool) -> None:
    for stock, ours in ranks.run(2, refusals):
        assert [end.kinds[0] for end in stock] == [end.kinds[0] for end in ours]
        for text in (
            *("Expected to have finished reduction", "set_static_graph() should be called before"),
            "DDP join hook requires passing in a DistributedDataParallel instance as the state",
        ):
            assert any(text in end.text for end in stock)
            assert any(text in end.text for end in ours)


# Communication hooks


def kept(state, bucket):  # type: ignore[no-untyped-def]  # stock rejects quoted annotations
    """Leave gradients local, and append the buffer to `state`."""
    state.append(bucket.buffer().clone())
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def hooked(rank: int, world_size: int) -> list[list[Any]]:
    """Per class: what becomes of sparse gradients, other strides, uneven inputs and bfloat16."""
    found = []
    for wrapped in CLASSES:
        words = wrapped(nn.Embedding(2, 2, sparse=True))
        words.register_comm_hook(None, noop_hook)
        words(torch.tensor([rank])).sum().backward()

        buffers: list[torch.Tensor] = []
        image = nn.Conv2d(2, 1, (1, 2), bias=False).to(memory_format=torch.channels_last)
        model = wrapped(image)
        model.register_comm_hook(buffers, kept)
        model(torch.arange(4.0).view(1, 2, 1, 2)).sum().backward()

        uneven = wrapped(nn.Linear(1, 1, bias=False))
        uneven._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
        with uneven.join(divide_by_initial_world_size=False):
            for _ in range(1 + rank):
                uneven.zero_grad()
                uneven(torch.full((1, 1), 4.0)).sum().backward()
        grad = uneven.module.weight.grad.item()

        small = wrapped(nn.Linear(1, 1, bias=False))
        end = ending(lambda: small.register_comm_hook(None, bf16_compress_hook))  # noqa: B023
        small(torch.full((1, 1), 2.0 * rank)).sum().backward()
        mean = small.module.weight.grad.item()

        sparse = words.module.weight.grad.to_dense()[:, 0].tolist()
        found.append([sparse, buffers[0].tolist(), grad, end.kinds[0], mean])
    return found


def test_hooks_differ_where_the_page_says_so(ranks: RankPool) -> None:
    for rank, (stock, ours) in enumerate(ranks.run(2, hooked)):
        alone = [1.0 - rank, float(rank)]
        assert stock == [alone, [0.0, 2.0, 1.0, 3.0], 2.0 if rank else 4.0, "TypeError", 1.0]
        assert ours == [[0.5, 0.5], [0.0, 1.0, 2.0, 3.0], 4.0, "no error", 1.0]
