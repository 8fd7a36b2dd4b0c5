"""Steps that the caller closes by `finalize_backward`, and buckets that are allocated lazily."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as StockDDP

import fddp
from tests.support.backward_calls import call_in_backward
from tests.support.groups import rank_of
from tests.support.ranks import Launch, RankPool, launch_fixture
from tests.support.wrapped_net import DDP, TINY_CAP_MB, batch, grads, net, run_backward

launch = launch_fixture("c10d", "shm", "loopback")
is_new_torch = pytest.mark.skipif(
    not hasattr(StockDDP, "finalize_backward"), reason="new in torch 2.15"
)
STEPS = 4


def manual(group: Any, **options: Any) -> Any:
    ddp = DDP(net(), process_group=group, **options)
    ddp.require_manual_backward_finalization = True
    return ddp


def refusal(call: Callable[[], object]) -> str:
    """Type and text of the error that a call raises; empty if it returns."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


# The same gradients


def train(
    group: Any, options: dict[str, Any], is_manual: bool, keeps_grads: bool
) -> list[dict[str, Tensor | None]]:
    arguments = {name: value for name, value in options.items() if name != "hook"}
    ddp = DDP(net(), process_group=group, **arguments)
    if "hook" in options:
        ddp.register_comm_hook(None, options["hook"])
    ddp.require_manual_backward_finalization = is_manual
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=not keeps_grads)
        if step == 2:
            with ddp.no_sync():
                run_backward(ddp, group, 10)
        run_backward(ddp, group, step)
        if is_manual:
            ddp.finalize_backward()
        found.append(grads(ddp.module))
        optimizer.step()
    return found


OPTIONS: list[dict[str, Any]] = [
    {},
    {"bucket_cap_mb": TINY_CAP_MB},
    {"gradient_as_bucket_view": True},
    {"static_graph": True},
    {"find_unused_parameters": True},
    {"nonfinite": "raise"},
    {"hook": fddp.hooks.fp16_compress},
    {"lazy_bucket_allocation": True},
    {"lazy_bucket_allocation": True, "gradient_as_bucket_view": True},
]


@pytest.mark.parametrize("keeps_grads", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True")
def test_gradients_have_the_same_bits(
    launch: Launch, options: dict[str, Any], keeps_grads: bool
) -> None:
    plain = {key: value for key, value in options.items() if key != "lazy_bucket_allocation"}
    wanted = launch(2, train, plain, False, keeps_grads)
    for found, usual in zip(launch(2, train, options, True, keeps_grads), wanted, strict=True):
        for step, (mine, other) in enumerate(zip(found, usual, strict=True)):
            assert mine.keys() == other.keys()
            assert all(torch.equal(mine[name], other[name]) for name in mine), step


# Open steps


def sent_before_finalization(group: Any, in_step: bool) -> list[bool]:
    """Per bucket, whether its all-reduce is under way when backward has returned."""
    ddp = manual(group, bucket_cap_mb=TINY_CAP_MB)
    found: list[bool] = []
    for step in range(2):
        if in_step:
            with ddp.in_step():
                run_backward(ddp, group, step)
                found = launched(ddp)
                ddp.finalize_backward()
        else:
            run_backward(ddp, group, step)
            found = launched(ddp)
            ddp.finalize_backward()
    return found


def launched(ddp: Any) -> list[bool]:
    return [not math.isnan(bucket.launch_s) for bucket in ddp.steps.runner.step.buckets]


@pytest.mark.parametrize("in_step", [False, True])
def test_the_last_bucket_is_sent_when_backward_ends(launch: Launch, in_step: bool) -> None:
    for found in launch(2, sent_before_finalization, in_step):
        assert len(found) > 2
        assert found == [True] * (len(found) - 1) + [not in_step]


def refused_while_open(group: Any) -> list[str]:
    ddp = manual(group)
    run_backward(ddp, group)
    with torch.no_grad():
        ddp(batch(rank_of(group)))
    said = [refusal(lambda: ddp(batch(0)))]
    with ddp.no_sync():
        said.append(refusal(lambda: ddp(batch(0))))
    said.append(refusal(ddp._check_reducer_finalized))
    said.append(refusal(lambda: setattr(ddp, "require_manual_backward_finalization", False)))
    ddp.finalize_backward()
    run_backward(ddp, group)
    ddp.finalize_backward()
    return said


def test_a_forward_pass_needs_the_step_before_it_closed(launch: Launch) -> None:
    for forward, in_no_sync, check, setter in launch(2, refused_while_open):
        assert forward.startswith("RuntimeError: Expected to have finalized the prior backward")
        assert forward == in_no_sync == check
        assert setter.startswith("RuntimeError: require_manual_backward_finalization cannot change")


def calls_without_a_step(group: Any) -> list[str]:
    ddp = DDP(net(), process_group=group)
    said = [refusal(ddp.finalize_backward)]
    ddp.require_manual_backward_finalization = True
    said.append(refusal(ddp.finalize_backward))
    loss = ddp(batch(0)).sum()
    ddp.require_manual_backward_finalization = True  # as it is
    said.append(refusal(lambda: setattr(ddp, "require_manual_backward_finalization", False)))
    said.append(refusal(ddp.finalize_backward))
    loss.backward()
    ddp.finalize_backward()
    said.append(refusal(ddp.finalize_backward))
    with ddp.no_sync():
        run_backward(ddp, group)
        said.append(refusal(ddp.finalize_backward))
    ddp.require_manual_backward_finalization = False
    run_backward(ddp, group)
    return said


def test_calls_without_a_step_are_refused(launch: Launch) -> None:
    for off, unused, setter, forward, again, in_no_sync in launch(2, calls_without_a_step):
        assert off.startswith("RuntimeError: finalize_backward() was called, but manual backward")
        assert setter.startswith("RuntimeError: require_manual_backward_finalization cannot change")
        for said in (unused, forward, again, in_no_sync):
            assert "no step requires finalization" in said


def two_passes(group: Any) -> tuple[str, list[dict[str, Any]]]:
    """A second pass through an output is refused, and leaves the first alone."""
    ddp = manual(group)
    first, second = (ddp(batch(rank_of(group), step)).square().mean() for step in (0, 1))
    first.backward()
    said = refusal(second.backward)
    ddp.finalize_backward()
    return said, [grads(ddp.module), *train(group, {}, False, False)[:1]]


def test_a_second_pass_is_refused(launch: Launch) -> None:
    for said, (found, wanted) in launch(2, two_passes):
        assert said.startswith("RuntimeError: Expected to have finalized the prior backward pass")
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def left_out(group: Any) -> tuple[str, bool]:
    ddp = manual(group)
    run_backward(ddp, group)
    ddp.module(batch(0)).sum().backward()
    said = refusal(ddp.finalize_backward)
    ddp.zero_grad()
    run_backward(ddp, group)
    ddp.finalize_backward()
    return said, all(grad is not None for grad in grads(ddp.module).values())


def test_gradients_of_no_step_are_an_error(launch: Launch) -> None:
    for said, goes_on in launch(2, left_out):
        assert "gradients arrived between a backward pass and its finalize_backward()" in said
        assert goes_on


# Within backward


def in_a_hook(group: Any) -> tuple[list[bool], list[bool], bool]:
    """Finalize at the last gradient before that of the input, where that is allowed."""
    ddp = manual(group, bucket_cap_mb=TINY_CAP_MB)
    later, early, same = [], [], True
    for step in range(3):
        ddp.zero_grad()
        x = batch(rank_of(group), step).requires_grad_()
        done: list[dict[str, Any]] = []

        def finalize(done: list[dict[str, Any]] = done) -> None:
            ddp.finalize_backward()
            done.append(grads(ddp.module))

        late = []
        inputs = call_in_backward(x, lambda late=late, f=finalize: None if late else f())
        loss = ddp(inputs).square().mean()
        later.append(ddp.should_finalize_after_backward)
        late += [True] * later[-1]
        loss.backward()
        early.append(bool(done))
        if late:
            finalize()
        same = same and all(torch.equal(done[0][n], g) for n, g in grads(ddp.module).items())
    return later, early, same


def test_a_hook_may_finalize_within_backward(launch: Launch) -> None:
    for later, early, same in launch(2, in_a_hook):
        assert later == [True, False, False]
        assert early == [False, True, True]
        assert same


def too_early(group: Any) -> tuple[str, list[dict[str, Any]]]:
    ddp, said = manual(group), []
    x = batch(rank_of(group))
    hidden = ddp(x)
    for layer in ddp.module.layers.values():
        layer.weight.register_post_accumulate_grad_hook(
            lambda _: said.append(refusal(ddp.finalize_backward))
        )
    hidden.square().mean().backward()
    ddp.finalize_backward()
    return said[0], [grads(ddp.module), *train(group, {}, False, False)[:1]]


def test_a_hook_that_finalizes_too_early_is_refused(launch: Launch) -> None:
    for said, (found, wanted) in launch(2, too_early):
        assert "was called before all parameters had their gradients: layers.l0." in said
        assert "should_finalize_after_backward" in said
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def when_to_finalize(group: Any, options: dict[str, Any], through: tuple[int, ...]) -> list[bool]:
    ddp, found = manual(group, **options), []
    for step in range(3):
        loss = ddp(batch(rank_of(group), step), through=through).square().mean()
        found.append(ddp.should_finalize_after_backward)
        loss.backward()
        ddp.finalize_backward()
    ddp.require_manual_backward_finalization = False
    return [*found, ddp.should_finalize_after_backward]


@pytest.mark.parametrize(
    ("options", "through", "wanted"),
    [
        ({}, (0, 1, 2), [True, False, False, False]),
        ({"static_graph": True}, (0, 2), [True, True, True, False]),
        ({"find_unused_parameters": True}, (0, 1, 2), [True, True, True, False]),
        (
            {
                "mixed_precision": torch.nn.parallel.distributed._MixedPrecision(
                    param_dtype=torch.float64
                )
            },
            (0, 1, 2),
            [True, True, True, False],
        ),
    ],
    ids=["plain", "unused", "find unused", "mixed"],
)
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True")
def test_when_to_finalize(
    launch: Launch, options: dict[str, Any], through: tuple[int, ...], wanted: list[bool]
) -> None:
    for found in launch(2, when_to_finalize, options, through):
        assert found == wanted


# Failures and uneven inputs


def fails_in_between(group: Any, in_step: bool) -> tuple[str, list[dict[str, Any]]]:
    """Rank 1 raises after backward, before it would finalize."""
    ddp, rank = manual(group), rank_of(group)

    def step() -> None:
        run_backward(ddp, group)
        if rank == 1:
            raise ValueError("no update here")
        ddp.finalize_backward()

    def whole_step() -> None:
        with ddp.in_step():
            step()

    said = refusal(whole_step if in_step else step)
    if rank == 1 and not in_step:
        ddp.finalize_backward()
    found = [grads(ddp.module)]
    ddp.zero_grad()
    run_backward(ddp, group)
    ddp.finalize_backward()
    return said, [*found, grads(ddp.module)]


@pytest.mark.parametrize("in_step", [False, True])
def test_exceptions_before_finalization(launch: Launch, in_step: bool) -> None:
    (said, good), (own, _) = launch(2, fails_in_between, in_step)
    assert own == "ValueError: no update here"
    if in_step:
        assert said.startswith("PeerError: ")
        assert "ValueError: no update here" in said
        assert set(good[0].values()) == {None}
    else:
        assert said == ""
        assert all(torch.equal(good[0][name], good[1][name]) for name in good[0])


def uneven(group: Any, is_manual: bool) -> list[dict[str, Any]]:
    ddp = DDP(net(), process_group=group)
    ddp.require_manual_backward_finalization = is_manual
    found = []
    with ddp.join():
        for step in range(3 - rank_of(group)):
            ddp.zero_grad()
            run_backward(ddp, group, step)
            if is_manual:
                ddp.finalize_backward()
            found.append(grads(ddp.module))
    return found


def test_uneven_inputs(launch: Launch) -> None:
    for found, wanted in zip(launch(2, uneven, True), launch(2, uneven, False), strict=True):
        assert [list(map(str, one.values())) for one in found] == [
            list(map(str, one.values())) for one in wanted
        ]


# Copies, and options that exclude it


def test_copies_keep_the_setting(ranks: RankPool) -> None:
    for found in ranks.run(2, copied):
        assert found == (True, True)


def copied(rank: int, world_size: int) -> tuple[bool, bool]:
    ddp = manual(None, lazy_bucket_allocation=True)
    other = copy.deepcopy(ddp)
    return other.require_manual_backward_finalization, other.lazy_bucket_allocation


def all_delayed(group: Any) -> tuple[str, str, bool]:
    module = net()
    named = list(module.named_parameters())
    ddp = DDP(
        module,
        process_group=group,
        delay_all_reduce_named_params=named,
        param_to_hook_all_reduce=named[0][1],
    )
    ddp.require_manual_backward_finalization = False
    setter = refusal(lambda: setattr(ddp, "require_manual_backward_finalization", True))
    return setter, refusal(ddp.finalize_backward), ddp.should_finalize_after_backward


def test_delayed_parameters_alone_are_refused(launch: Launch) -> None:
    for setter, call, late in launch(2, all_delayed):
        assert setter == call
        assert setter.startswith("RuntimeError: Manual backward finalization is not supported")
        assert not late


# Lazy allocation


def memory_of(group: Any, lazy: bool, as_view: bool) -> tuple[list[int], int, bool]:
    """Buffers of each bucket at the first gradient and between steps; True if gradients stayed in
    place in some step."""
    ddp = DDP(
        nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(3))),
        process_group=group,
        bucket_cap_mb=0.25,
        gradient_as_bucket_view=as_view,
        lazy_bucket_allocation=lazy,
    )
    allocated: list[int] = []
    x = torch.ones(1, 256)
    last = ddp.module[2].weight
    in_place = False
    for step in range(12):
        last.register_post_accumulate_grad_hook(lambda _: allocated.append(held(ddp)))
        before = last.grad
        place = None if before is None else before.data_ptr()
        ddp(x).sum().backward()
        if step >= 2:
            in_place |= last.grad.data_ptr() == place
    kept = len(ddp.steps.engine._pool._released)
    return allocated[-1:], kept, in_place


def held(ddp: Any) -> int:
    step = ddp.steps.runner.step
    if step._usual is not None:
        return len(step._usual.buffers)
    return sum(bucket.buffer is not None for bucket in step.buckets)


@pytest.mark.parametrize("as_view", [False, True])
def test_lazy_buckets_are_allocated_late_and_released(launch: Launch, as_view: bool) -> None:
    for (at_first,), kept, _ in launch(2, memory_of, False, as_view):
        assert kept == 3
        assert at_first > 0
    for (at_first,), kept, in_place in launch(2, memory_of, True, as_view):
        assert at_first == 0
        # Threads of other transports, and in some steps of this one, still refer to the buffer.
        assert in_place or launch.name != "shm"
        assert kept == (3 if as_view else 0)  # the memory of gradients that still exist


# Beside stock DDP


def trace(wrapped: type[nn.Module]) -> list[Any]:
    """Results of calls in and out of turn: values, or types of errors."""
    found: list[Any] = []

    def note(call: Callable[[], Any]) -> None:
        said = refusal(lambda: found.append(call()))
        if said:
            found.append(said.partition(":")[0])

    ddp: Any = wrapped(net())
    rank = torch.distributed.get_rank()

    def put(value: bool) -> None:
        ddp.require_manual_backward_finalization = value

    def loss(step: int = 0) -> Tensor:
        return ddp(batch(rank, step)).square().mean()

    note(ddp.finalize_backward)
    note(lambda: put(True))
    note(ddp.finalize_backward)
    for step in range(3):
        ddp.zero_grad()
        total = loss(step)
        note(lambda: ddp.should_finalize_after_backward)
        note(lambda: put(True))
        note(lambda: put(False))
        note(ddp.finalize_backward)
        total.backward()
        note(lambda: put(False))
        note(lambda: ddp(batch(rank)))
        note(ddp._check_reducer_finalized)
        with ddp.no_sync():
            note(lambda: ddp(batch(rank)))
            note(ddp.finalize_backward)  # of the step before
        note(lambda: ddp.module.layers["l0"].bias.grad.tolist())
        note(ddp.finalize_backward)
    with ddp.no_sync():
        loss().backward()
        note(ddp.finalize_backward)
    first, second = loss(5), loss(6)
    first.backward()
    note(second.backward)
    note(ddp.finalize_backward)
    note(lambda: ddp.module.layers["l0"].bias.grad.tolist())
    note(lambda: put(False))
    note(lambda: ddp.should_finalize_after_backward)
    loss(7).backward()
    note(lambda: ddp.module.layers["l0"].bias.grad.tolist())
    put(True)
    note(lambda: copy.deepcopy(ddp).require_manual_backward_finalization)
    return found


def traces(rank: int, world_size: int) -> list[list[Any]]:
    return [trace(wrapped) for wrapped in (StockDDP, DDP)]


@is_new_torch
def test_calls_in_and_out_of_turn_as_with_stock(ranks: RankPool) -> None:
    for stock, ours in ranks.run(2, traces):
        assert stock == ours


def lazily(rank: int, world_size: int, options: dict[str, Any]) -> list[list[dict[str, Any]]]:
    found = []
    for wrapped in (StockDDP, DDP):
        ddp: Any = wrapped(net(), lazy_bucket_allocation=True, bucket_cap_mb=TINY_CAP_MB, **options)
        steps = []
        for step in range(STEPS):
            ddp.zero_grad(set_to_none=step != 2)
            run_backward(ddp, torch.distributed.group.WORLD, step)
            steps.append(grads(ddp.module))
        found.append(steps)
    return found


@is_new_torch
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}])
def test_lazy_buckets_as_with_stock(ranks: RankPool, options: dict[str, Any]) -> None:
    for stock, ours in ranks.run(2, lazily, options):
        for mine, theirs in zip(ours, stock, strict=True):
            assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
