"""`DistributedDataParallel.weighted`: the mean over all items of all ranks and micro-batches."""

from __future__ import annotations

import contextlib
import gc
import math
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

import fddp
from fddp.ddp import logging_data
from fddp.errors import PeerError, WeightError
from tests.support.hook_models import Halves
from tests.support.models import rand
from tests.support.on_ranks import on_processes, on_threads
from tests.support.pairwise import pairwise
from tests.support.wrapped_net import DDP, TINY_CAP_MB, WIDTH, assert_close, grads, net

pytestmark = pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
STEPS, MICRO = 4, 3


def items(rank: int, step: int, micro: int, count: int) -> Tensor:
    return rand(count, WIDTH, seed=1000 * step + 10 * rank + micro).double()


def mean_loss(module: nn.Module, x: Tensor) -> Tensor:
    """Mean over items; NaN if there are none, with gradients of zero."""
    loss: Tensor = module(x).square().mean(1).mean()
    return loss


# The law


class Case(NamedTuple):
    passes: str
    empty: str
    order: str
    hook: str
    join: str
    options: str
    cleared: str
    kind: str
    times: str


PASSES = ["one", "micro-batches", "one block"]
EMPTY = ["none", "one micro-batch", "a rank in a step"]
ORDER = ["weighted in no_sync", "no_sync in weighted", "backward alone"]
HOOKS: dict[str, Any] = {"none": None, "all": fddp.hooks.top_k(1.0), "halves": Halves()}
JOINS = ["none", "join", "join, own divisor"]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "small buckets": {"bucket_cap_mb": TINY_CAP_MB},
    "views": {"gradient_as_bucket_view": True, "bucket_cap_mb": TINY_CAP_MB},
    "static": {"static_graph": True},
    "find unused": {"find_unused_parameters": True},
    "skip unused": {"skip_all_reduce_unused_params": True, "bucket_cap_mb": TINY_CAP_MB},
    "lazy": {"lazy_bucket_allocation": True, "gradient_as_bucket_view": True},
    "raise": {"nonfinite": "raise"},
    "manual": {},
}
CLEARED = ["None", "zeros"]
KINDS: dict[str, Callable[[int], Any]] = {
    "int": int,
    "float": float,
    "tensor": lambda count: torch.tensor(count),
}
TIMES = ["measured", "not measured"]  # Python packs steps whose times are measured


def is_valid(row: tuple[str, ...]) -> bool:
    case = Case(*row)
    if case.join != "none" and case.order == "backward alone":
        return False  # an error
    return case.passes != "one block" or case.empty == "none"


ROWS = pairwise(
    PASSES, EMPTY, ORDER, [*HOOKS], JOINS, [*OPTIONS], CLEARED, [*KINDS], TIMES, valid=is_valid
)


def counts(case: Case, rank: int, step: int) -> list[int]:
    """Number of items of each micro-batch of a rank in a step."""
    found = [1 + (rank + 2 * step + micro) % 4 for micro in range(MICRO)]
    if case.passes == "one":
        found = found[:1]
    if case.empty == "one micro-batch" and rank == step % 2:
        found[(step - 1) % len(found)] = 0
    if case.empty == "a rank in a step" and rank == step % 2:
        found = [0] * len(found)
    return found


def steps_of(case: Case, rank: int) -> int:
    return STEPS - (rank == 1 and case.join != "none")


def take_step(ddp: Any, case: Case, rank: int, step: int) -> None:
    kind, numbers = KINDS[case.kind], counts(case, rank, step)
    total = sum(numbers)
    with ddp.weighted(kind(total)) if case.passes == "one block" else contextlib.nullcontext():
        for micro, count in enumerate(numbers):
            with contextlib.ExitStack() as stack:
                is_last = micro == len(numbers) - 1
                quiet = contextlib.nullcontext() if is_last else ddp.no_sync()
                x = items(rank, step, micro, count)
                if count == 0 and (step + micro) % 2:
                    x = torch.full((1, WIDTH), math.nan, dtype=x.dtype)  # its gradients are NaN
                if case.passes == "one block":
                    stack.enter_context(quiet)
                    (mean_loss(ddp, x) * (count / total)).backward()
                    continue
                if case.order == "weighted in no_sync":
                    stack.enter_context(quiet)
                    stack.enter_context(ddp.weighted(kind(count)))
                    mean_loss(ddp, x).backward()
                elif case.order == "no_sync in weighted":
                    stack.enter_context(ddp.weighted(kind(count)))
                    stack.enter_context(quiet)
                    mean_loss(ddp, x).backward()
                else:
                    stack.enter_context(quiet)
                    loss = mean_loss(ddp, x)
                    with ddp.weighted(kind(count)):
                        loss.backward()


def train(group: Any, case: Case, rank: int) -> list[dict[str, Tensor | None]]:
    """Gradients of each step of this rank."""
    ddp = DDP(net(), process_group=group, **OPTIONS[case.options])
    if HOOKS[case.hook] is not None:
        ddp.register_comm_hook(None, HOOKS[case.hook])
    ddp.require_manual_backward_finalization = case.options == "manual"
    sgd, found = torch.optim.SGD(ddp.parameters(), lr=0.1), []
    joins: dict[str, Callable[[], Any]] = {
        "none": contextlib.nullcontext,
        "join": ddp.join,
        "join, own divisor": lambda: ddp.join(divide_by_initial_world_size=False),
        "Join": lambda: Join([ddp]),
    }
    with joins[case.join]():
        for step in range(steps_of(case, rank)):
            sgd.zero_grad(set_to_none=case.cleared == "None")
            take_step(ddp, case, rank, step)
            if case.options == "manual":
                ddp.finalize_backward()
            found.append(grads(ddp.module))
            sgd.step()
    return found


def train_alone(case: Case, world_size: int) -> list[dict[str, Tensor | None]]:
    """The same by one process on the union of items."""
    module, found = net(), []
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(STEPS):
        present = [rank for rank in range(world_size) if step < steps_of(case, rank)]
        every = [
            items(rank, step, micro, count)
            for rank in present
            for micro, count in enumerate(counts(case, rank, step))
        ]
        sgd.zero_grad()
        mean_loss(module, torch.cat(every)).backward()
        found.append(grads(module))
        sgd.step()
    return found


def check(found: list[dict[str, Tensor | None]], case: Case, world_size: int) -> None:
    for step, (own, wanted) in enumerate(zip(found, train_alone(case, world_size), strict=False)):
        assert own.keys() == wanted.keys(), step
        assert_close(own, wanted)


@pytest.mark.parametrize("row", ROWS, ids=", ".join)
def test_equal_to_one_process_on_the_union(
    row: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(*row)
    if case.times == "not measured":
        monkeypatch.setattr(logging_data, "is_sampled", lambda *_: False)
    for rank, found in enumerate(fddp.loopback(3, lambda group: train(group, case, group.rank))):
        assert len(found) == steps_of(case, rank)
        check(found, case, 3)


@on_processes(2)
def test_processes(rank: int, world_size: int) -> None:
    first = "micro-batches", "one micro-batch", ORDER[0], "none"
    with mock.patch.object(logging_data, "is_sampled", return_value=False):
        for join in ("none", "Join"):  # the latter counts over a process group
            case = Case(*first, join, "views", "None", "tensor", "not measured")
            check(train(torch.distributed.group.WORLD, case, rank), case, world_size)


@pytest.mark.parametrize("hook", [None, fddp.hooks.top_k(1.0)], ids=str)
@on_threads(2)
def test_sparse_gradients(group: Any, hook: Any) -> None:
    def model() -> nn.Module:
        table = nn.Sequential(nn.Embedding(9, 3, sparse=True), nn.Linear(3, 1)).double()
        for number, leaf in enumerate(table.parameters()):
            leaf.data = rand(*leaf.shape, seed=number).double()
        return table

    def words(rank: int, step: int, micro: int) -> Tensor:
        return torch.tensor([1, 1, 2 + rank, 3 + step, 5 + micro][: 2 + rank + micro])

    ddp = DDP(model(), process_group=group)
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    for step in range(3):
        ddp.zero_grad()
        for micro in range(2):
            own, quiet = words(group.rank, step, micro), ddp.no_sync()
            with ddp.weighted(len(own)), contextlib.nullcontext() if micro else quiet:
                mean_loss(ddp, own).backward()
        alone = model()
        every = [words(rank, step, micro) for rank in range(2) for micro in range(2)]
        mean_loss(alone, torch.cat(every)).backward()
        found, wanted = grads(ddp.module), grads(alone)
        dense = {name: grad.to_dense() for name, grad in found.items() if grad is not None}
        assert_close(dense, {name: g.to_dense() for name, g in wanted.items() if g is not None})


def through_of(rank: int, micro: int) -> tuple[int, ...]:
    """Layers of a micro-batch: rank 0 alone uses the first, no rank the third in its last one."""
    return ((0, 1), (1,), (1, 2))[micro] if rank == 0 else ((1,), (2,), (1,))[micro]


@pytest.mark.parametrize("scale", [1.0, 3.5])
def test_the_numbers_of_value_and_grad(scale: float) -> None:
    weights = ([2.0 * scale, scale, 0.0], [0.0, 5.0 * scale, scale])

    def run(group: Any) -> None:
        module, rank = net(), group.rank
        batches = [items(rank, 0, micro, 2) for micro in range(MICRO)]
        batches[weights[rank].index(0.0)][:] = math.nan

        def loss_fn(params: dict[str, Tensor], micro: int) -> Tensor:
            inputs = batches[micro], through_of(rank, micro)
            loss: Tensor = torch.func.functional_call(module, params, inputs).square().mean()
            return loss

        params = {name: p.detach().clone() for name, p in module.named_parameters()}
        own, total = {name: torch.zeros_like(p) for name, p in params.items()}, 0.0
        used: set[str] = set()
        for micro, weight in enumerate(weights[rank][:-1]):
            if weight:
                for name, grad in torch.func.grad(loss_fn)(params, micro).items():
                    own[name] += weight * grad
                    used |= {name} if grad.any() else set()
                total += weight
        earlier = {name: grad if name in used else None for name, grad in own.items()}
        with fddp.GradSync(params, group=group) as sync:
            step = sync.value_and_grad(loss_fn, weight_fn=lambda p, micro: weights[rank][micro])
            _, wanted = step(params, MICRO - 1, accumulated=(earlier, total))

        ddp = DDP(module, process_group=group, find_unused_parameters=True)
        for micro, weight in enumerate(weights[rank]):
            is_last = micro == MICRO - 1
            with ddp.weighted(weight), contextlib.nullcontext() if is_last else ddp.no_sync():
                ddp(batches[micro], through_of(rank, micro)).square().mean().backward()
        assert_close(grads(module), wanted)

    fddp.loopback(2, run)


def test_weights_of_one_are_the_plain_mean_bit_for_bit() -> None:
    def run(group: Any) -> None:
        found = []
        for weight in (None, 1, 4.0):
            ddp = DDP(net(), process_group=group)
            with contextlib.nullcontext() if weight is None else ddp.weighted(weight):
                mean_loss(ddp, items(group.rank, 0, 0, 3)).backward()
            found.append(grads(ddp.module))
        for own in found[1:]:
            assert all(torch.equal(own[name], found[0][name]) for name in own)

    fddp.loopback(2, run)


@on_threads(2)
def test_between_micro_batches_grad_holds_the_weighted_sum(group: Any) -> None:
    ddp, alone = DDP(net(), process_group=group), net()
    for micro, count in enumerate([3, 0, 2]):
        x = items(group.rank, 0, micro, count)
        with ddp.no_sync(), ddp.weighted(count):
            mean_loss(ddp, x).backward()
        if count:
            (mean_loss(alone, x) * count).backward()
        assert_close(grads(ddp.module), grads(alone))


class Shares(nn.Module):
    """Layers whose gradients share memory: of a sum, through a view, expanded, and of a hook."""

    def __init__(self) -> None:
        super().__init__()
        names = ("one", "other", "viewed", "expanded", "hooked")
        for number, name in enumerate(names):
            self.register_parameter(name, nn.Parameter(rand(1, WIDTH, seed=number).double()))
        self.seen: list[Tensor] = []
        self.hooked.register_hook(self.seen.append)

    def forward(self, x: Tensor) -> Tensor:
        summed = self.one + self.other + self.viewed.view(WIDTH).view(1, WIDTH)
        factors = summed.exp() + self.hooked.sin()
        return x * factors + self.expanded.sum() * x.mean(1, keepdim=True)


@on_threads(2)
def test_gradients_that_share_memory(group: Any) -> None:
    ddp, alone = DDP(Shares(), process_group=group), Shares()
    x = [items(rank, 0, 0, 1 + rank) for rank in range(2)]
    with ddp.weighted(1 + group.rank):
        mean_loss(ddp, x[group.rank]).backward()
    mean_loss(alone, x[group.rank]).backward()
    assert_close({"seen": ddp.module.seen[0]}, {"seen": alone.seen[0]})
    alone.zero_grad()
    mean_loss(alone, torch.cat(x)).backward()
    assert_close(grads(ddp.module), grads(alone))


@on_threads(2)
def test_a_rank_without_a_weight_has_weight_one(group: Any) -> None:
    ddp, alone = DDP(net(), process_group=group), net()
    with ddp.weighted(3) if group.rank else contextlib.nullcontext():
        mean_loss(ddp, items(group.rank, 0, 0, 2)).backward()
    for rank, weight in enumerate((1, 3)):
        (mean_loss(alone, items(rank, 0, 0, 2)) * weight / 4).backward()
    assert_close(grads(ddp.module), grads(alone))


@pytest.mark.parametrize("finds", [False, True])
@on_threads(2)
def test_an_empty_rank_repairs_no_bucket(group: Any, finds: bool) -> None:
    options = {"bucket_cap_mb": TINY_CAP_MB, "find_unused_parameters": finds}
    ddp = DDP(net(), process_group=group, **options)
    ddp.keep_sync_info()
    for step in range(5):
        ddp.zero_grad()
        count = 0 if step == 2 and group.rank else 2
        with ddp.weighted(count):
            mean_loss(ddp, items(group.rank, step, 0, count)).backward()
        assert ddp.sync_info.repaired == ()
        assert ddp.sync_info.active == (1 if step == 2 else 2)
        assert ddp.sync_info.total_weight == (2.0 if step == 2 else 4.0)


@on_threads(2)
def test_hooks_of_torch_need_equal_weights(group: Any) -> None:
    ddp, alone = DDP(net(), process_group=group), net()
    ddp.register_comm_hook(None, hook_over(group))
    for weights in ((3, 3), (3, 2), (3, 0)):
        ddp.zero_grad()
        problem = contextlib.nullcontext()
        if weights != (3, 3):
            problem = pytest.raises(WeightError, match="needs equal weights on all ranks")
        with problem, ddp.weighted(weights[group.rank]):
            mean_loss(ddp, items(group.rank, 0, 0, 2)).backward()
        if weights == (3, 3):
            for rank in range(2):
                (mean_loss(alone, items(rank, 0, 0, 2)) / 2).backward()
            assert_close(grads(ddp.module), grads(alone))


@on_threads(2)
def test_hooks_of_torch_within_join(group: Any) -> None:
    """They would divide by all ranks where one has no input, and no weight."""
    ddp = DDP(net(), process_group=group)
    ddp.register_comm_hook(None, hook_over(group))

    def steps() -> None:
        for step in range(2 - group.rank):
            ddp.zero_grad()
            with ddp.weighted(3):
                mean_loss(ddp, items(group.rank, step, 0, 2)).backward()

    with pytest.raises(WeightError, match="needs equal weights on all ranks"), ddp.join():
        steps()


def hook_over(group: Any) -> Any:
    """As torch's `allreduce_hook`, over threads."""

    def hook(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(fddp.pmean(bucket.buffer(), group))
        return future

    return hook


# Errors


def fails_on_all(ddp: Any, group: Any, owner: int, text: str, step: Callable[[], object]) -> None:
    """Take a step that fails because of one rank, then one of all ranks that succeeds."""
    with pytest.raises(WeightError if group.rank == owner else PeerError) as raised:
        step()
    assert text in str(raised.value)
    assert f"rank {owner}" in str(raised.value)
    succeeds(ddp, group)


def succeeds(ddp: Any, group: Any) -> None:
    """Take a step after gradients were cleared."""
    ddp.zero_grad()
    alone = net()
    with ddp.weighted(1 + group.rank):
        mean_loss(ddp, items(group.rank, 9, 0, 1 + group.rank)).backward()
    every = [items(rank, 9, 0, 1 + rank) for rank in range(group.size)]
    mean_loss(alone, torch.cat(every)).backward()
    assert_close(grads(ddp.module), grads(alone))


@pytest.mark.parametrize(
    ("weight", "text"),
    [
        (-1, "at least 0 and at most 2**512, got -1.0"),
        (math.nan, "got nan"),
        (torch.tensor(math.inf), "got inf"),
        (None, "a weight must be a number, got None"),
        ("3", "a weight must be a number, got '3'"),
        (torch.ones(2), "a weight must be a number, got tensor([1., 1.])"),
    ],
    ids=str,
)
@pytest.mark.parametrize("quiet", [False, True])
@on_threads(2)
def test_an_invalid_weight_fails_the_step_on_all_ranks(
    group: Any, weight: Any, text: str, quiet: bool
) -> None:
    ddp = DDP(net(), process_group=group)

    def step() -> None:
        given = weight if group.rank == 1 else 2
        if quiet:
            with ddp.no_sync(), ddp.weighted(given):
                mean_loss(ddp, items(group.rank, 0, 0, 2)).backward()
            given = 2
        with ddp.weighted(given):
            mean_loss(ddp, items(group.rank, 0, 1, 2)).backward()

    fails_on_all(ddp, group, 1, text, step)


@on_threads(2)
def test_no_weight_on_any_rank(group: Any) -> None:
    ddp = DDP(net(), process_group=group)
    with (
        pytest.raises(WeightError, match=r"the total weight over 2 ranks is 0\.0"),
        ddp.weighted(0),
    ):
        mean_loss(ddp, items(group.rank, 0, 0, 0)).backward()
    assert grads(ddp.module) == dict.fromkeys(grads(ddp.module))
    succeeds(ddp, group)


def backward_outside(ddp: Any, x: Tensor) -> None:
    with ddp.weighted(2):
        loss = mean_loss(ddp, x)
    loss.backward()


def last_without_weight(ddp: Any, x: Tensor) -> None:
    with ddp.no_sync(), ddp.weighted(2):
        mean_loss(ddp, x).backward()
    mean_loss(ddp, x).backward()


def first_without_weight(ddp: Any, x: Tensor) -> None:
    with ddp.no_sync():
        mean_loss(ddp, x).backward()
    with ddp.weighted(2):
        mean_loss(ddp, x).backward()


def middle_without_weight(ddp: Any, x: Tensor) -> None:
    with ddp.no_sync():
        with ddp.weighted(2):
            mean_loss(ddp, x).backward()
        mean_loss(ddp, x).backward()
    with ddp.weighted(2):
        mean_loss(ddp, x).backward()


def cleared_then_without_weight(ddp: Any, x: Tensor) -> None:
    with ddp.no_sync():
        with ddp.weighted(2):
            mean_loss(ddp, x).backward()
        ddp.zero_grad()
        mean_loss(ddp, x).backward()
    with ddp.weighted(2):
        mean_loss(ddp, x).backward()


def middle_then_last_without_weight(ddp: Any, x: Tensor) -> None:
    with ddp.no_sync():
        with ddp.weighted(2):
            mean_loss(ddp, x).backward()
        mean_loss(ddp, x).backward()
    mean_loss(ddp, x).backward()


def changed_between(ddp: Any, x: Tensor) -> None:
    with ddp.no_sync(), ddp.weighted(2):
        mean_loss(ddp, x).backward()
    for param in ddp.parameters():
        param.grad.mul_(2.0)
    with ddp.weighted(2):
        mean_loss(ddp, x).backward()


def replaced_between(ddp: Any, x: Tensor) -> None:
    with ddp.no_sync(), ddp.weighted(2):
        mean_loss(ddp, x).backward()
    for param in ddp.parameters():
        param.grad = param.grad + 1.0
    with ddp.weighted(2):
        mean_loss(ddp, x).backward()


def not_cleared(ddp: Any, x: Tensor) -> None:
    for param in ddp.parameters():
        param.grad = torch.ones_like(param)
    with ddp.weighted(2):
        mean_loss(ddp, x).backward()


def second_derivative(ddp: Any, x: Tensor) -> None:
    with ddp.weighted(2):
        mean_loss(ddp, x).backward(create_graph=True)


MISTAKES = {
    backward_outside: "its backward pass outside, where it has no weight",
    last_without_weight: "a backward pass without a weight ends a step that began with weighted",
    first_without_weight: "'layers.l0.bias' had a gradient before the first weighted backward",
    middle_without_weight: "or was changed since: call zero_grad()",
    middle_then_last_without_weight: "or was changed since: call zero_grad()",
    cleared_then_without_weight: "or was changed since: call zero_grad()",
    changed_between: "or was changed since: call zero_grad()",
    replaced_between: "or was changed since: call zero_grad()",
    not_cleared: "had a gradient before the first weighted backward pass of a step",
    second_derivative: "create_graph=True and weighted() can't be combined",
}


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
@pytest.mark.parametrize("owner", [0, 1])
@on_threads(2)
def test_a_mistake_of_one_rank_fails_the_step_on_all(
    group: Any, mistake: Callable[[Any, Tensor], None], owner: int
) -> None:
    ddp = DDP(net(), process_group=group)

    def step() -> None:
        x = items(group.rank, 0, 0, 2)
        if group.rank == owner:
            mistake(ddp, x)
            return
        with ddp.weighted(2):
            mean_loss(ddp, x).backward()

    fails_on_all(ddp, group, owner, MISTAKES[mistake], step)


@on_threads(2)
def test_a_second_step_in_a_block(group: Any) -> None:
    ddp = DDP(net(), process_group=group)
    with ddp.weighted(2):
        loss = mean_loss(ddp, items(group.rank, 0, 0, 2))
        loss.backward(retain_graph=True)
        with pytest.raises(WeightError, match="had a gradient before the first weighted"):
            loss.backward()
    succeeds(ddp, group)


@on_threads(2)
def test_nested_blocks(group: Any) -> None:
    ddp = DDP(net(), process_group=group)
    with (
        pytest.raises(WeightError, match="entered within another block of weighted"),
        ddp.weighted(2),
        ddp.weighted(3),
    ):
        raise AssertionError
    succeeds(ddp, group)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("way", ["exception", "cleared", "cleared within"])
@on_threads(2)
def test_micro_batches_that_are_given_up_leave_no_weight(group: Any, way: str, kept: bool) -> None:
    ddp, alone = DDP(net(), process_group=group), net()
    if kept:
        succeeds(ddp, group)
        ddp.zero_grad(set_to_none=False)
    if group.rank == 0:
        with contextlib.suppress(KeyError), ddp.no_sync(), ddp.weighted(7):
            mean_loss(ddp, items(group.rank, 0, 0, 7)).backward()
            if way == "exception":
                raise KeyError
    if way != "cleared within":
        ddp.zero_grad(set_to_none=not kept)
    with ddp.weighted(2):
        if way == "cleared within":
            ddp.zero_grad(set_to_none=not kept)
        mean_loss(ddp, items(group.rank, 0, 1, 2)).backward()
    mean_loss(alone, torch.cat([items(rank, 0, 1, 2) for rank in range(2)])).backward()
    assert_close(grads(ddp.module), grads(alone))


@on_threads(2)
def test_after_an_exception_gradients_have_to_be_cleared(group: Any) -> None:
    ddp = DDP(net(), process_group=group)
    with contextlib.suppress(KeyError), ddp.no_sync(), ddp.weighted(7):
        mean_loss(ddp, items(group.rank, 0, 0, 7)).backward()
        raise KeyError
    with pytest.raises(WeightError, match="had a gradient before"), ddp.weighted(2):
        mean_loss(ddp, items(group.rank, 0, 1, 2)).backward()
    succeeds(ddp, group)


@on_threads(2)
def test_in_step_reports_an_exception_of_the_block(group: Any) -> None:
    ddp = DDP(net(), process_group=group)

    def step() -> None:
        with ddp.no_sync(), ddp.weighted(2):
            mean_loss(ddp, items(group.rank, 0, 0, 2)).backward()
        with ddp.weighted(3):
            loss = mean_loss(ddp, items(group.rank, 0, 1, 3))
            if group.rank:
                raise KeyError
            loss.backward()

    with pytest.raises(KeyError if group.rank else PeerError), ddp.in_step():
        step()
    succeeds(ddp, group)


@on_threads(2)
def test_within_join_the_block_contains_the_forward_pass(group: Any) -> None:
    ddp = DDP(net(), process_group=group)
    with ddp.join():
        loss = mean_loss(ddp, items(group.rank, 0, 0, 2))
        with (
            pytest.raises(WeightError, match=r"a block of weighted\(\) has to contain the forward"),
            ddp.weighted(2),
        ):
            loss.backward()


@pytest.mark.parametrize("name", ["virtual_ranks", "report", "delayed"])
@on_threads(2)
def test_arguments_that_take_no_weights(group: Any, name: str) -> None:
    module = net()
    options: dict[str, dict[str, Any]] = {
        "virtual_ranks": {"virtual_ranks": 2},
        "report": {"report": "next"},
        "delayed": {
            "delay_all_reduce_named_params": [("layers.l0.bias", module.layers["l0"].bias)],
            "param_to_hook_all_reduce": module.layers["l0"].weight,
        },
    }
    ddp = DDP(module, process_group=group, **options[name])
    with pytest.raises(ValueError, match=r"weighted\(\) and .* can't be combined"):
        ddp.weighted(2)


def of_parameters(ddp: Any) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(torch.optim.SGD, ddp.parameters(), {"lr": 0.1})


def fused(ddp: Any) -> None:
    with warnings.catch_warnings(record=True):  # of torch, about its own code
        ddp._register_fused_optim(torch.optim.SGD, lr=0.1)


@pytest.mark.filterwarnings("ignore:`torch.jit")  # of torch's own optimizers, as they are imported
@pytest.mark.parametrize("register", [of_parameters, fused])
@on_threads(1)
def test_optimizers_in_backward_take_no_weights(
    group: Any, register: Callable[[Any], None]
) -> None:
    ddp = DDP(net(), process_group=group)
    register(ddp)
    with pytest.raises(ValueError, match="an optimizer that steps in backward can't be combined"):
        ddp.weighted(2)


# Life


@on_threads(1)
def test_a_wrapper_is_freed_after_its_blocks(group: Any) -> None:
    ddp = DDP(net(), process_group=group)
    succeeds(ddp, group)
    with ddp.no_sync(), ddp.weighted(2):
        mean_loss(ddp, items(0, 0, 0, 2)).backward()
    alive = weakref.ref(ddp)
    gc.disable()
    try:
        del ddp
        assert alive() is None
    finally:
        gc.enable()


@on_threads(2)
def test_parameters_that_change_in_a_block(group: Any) -> None:
    ddp = DDP(net(), process_group=group)
    frozen = ddp.module.layers["l0"].weight.requires_grad_(False)
    succeeds_frozen(ddp, group)
    frozen.requires_grad_()
    succeeds(ddp, group)


def succeeds_frozen(ddp: Any, group: Any) -> None:
    ddp.zero_grad()
    with ddp.weighted(2):
        mean_loss(ddp, items(group.rank, 0, 0, 2)).backward()
    assert ddp.module.layers["l0"].weight.grad is None


@on_threads(2)
def test_a_wrapper_that_opens_in_a_block(group: Any) -> None:
    succeeds(DDP(net(), process_group=group, init_sync=False), group)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at outputs
@on_threads(1)
def test_a_compiled_function_contains_the_block(group: Any) -> None:
    ddp = DDP(net(), process_group=group)

    @torch.compile(backend="eager")
    def step(x: Tensor) -> Tensor:
        with ddp.weighted(2):
            loss = mean_loss(ddp, 1.0 * x)
            loss.backward()
        return loss.detach() + 1.0

    alone = net()
    mean_loss(alone, items(0, 0, 0, 2)).backward()
    for _ in range(2):
        ddp.zero_grad()
        step(items(0, 0, 0, 2))
        assert_close(grads(ddp.module), grads(alone))
