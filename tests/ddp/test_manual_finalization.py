"""Steps that the caller closes by `finalize_backward`, and buckets that are allocated lazily."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel as StockDDP

import fddp
from fddp.native.buffer_pool import BufferPool
from tests.support.backward_calls import call_in_backward
from tests.support.beside_stock import beside_stock
from tests.support.models import same_bits
from tests.support.ranks import RankPool
from tests.support.wrapped_net import DDP, TINY_CAP_MB, batch, grads, net, run_backward

pytestmark = pytest.mark.filterwarnings("ignore:find_unused_parameters=True")
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
    group: Any, options: dict[str, Any], is_manual: bool, keeps_grads: bool = False
) -> list[dict[str, Tensor | None]]:
    arguments = {name: value for name, value in options.items() if name not in ("hook", "join")}
    ddp = DDP(net(), process_group=group, **arguments)
    if "hook" in options:
        ddp.register_comm_hook(None, options["hook"])
    ddp.require_manual_backward_finalization = is_manual
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    found, joins = [], "join" in options
    with ddp.join() if joins else contextlib.nullcontext():
        for step in range(STEPS - joins * group.rank):
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
    {"join": True},
    {"lazy_bucket_allocation": True},
    {"lazy_bucket_allocation": True, "gradient_as_bucket_view": True},
]


@pytest.mark.parametrize("keeps_grads", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_have_the_same_bits(options: dict[str, Any], keeps_grads: bool) -> None:
    plain = {key: value for key, value in options.items() if key != "lazy_bucket_allocation"}
    wanted = fddp.loopback(2, train, plain, False, keeps_grads)
    found = fddp.loopback(2, train, options, True, keeps_grads)
    for mine, other in zip(found, wanted, strict=True):
        assert same_bits([mine, other])


# Open steps


@pytest.mark.parametrize("in_step", [False, True])
def test_the_last_bucket_is_sent_when_backward_ends(in_step: bool) -> None:
    def run(group: Any) -> None:
        ddp = manual(group, bucket_cap_mb=TINY_CAP_MB)

        def step(number: int) -> None:
            run_backward(ddp, group, number)
            if number:  # once the plan has the order of arrival
                times_s = ddp.steps.step.executor.launch_s()
                launched = [not math.isnan(time_s) for time_s in times_s]
                assert len(launched) > 2
                assert launched == [True] * (len(launched) - 1) + [not in_step]
            ddp.finalize_backward()

        for number in range(2):
            if in_step:
                with ddp.in_step():
                    step(number)
            else:
                step(number)

    fddp.loopback(2, run)


def test_a_forward_pass_needs_the_step_before_it_closed() -> None:
    def run(group: Any) -> None:
        ddp = manual(group)
        run_backward(ddp, group)
        with torch.no_grad():
            ddp(batch(group.rank))
        forward = refusal(lambda: ddp(batch(0)))
        assert forward.startswith("RuntimeError: Expected to have finalized the prior backward")
        with ddp.no_sync():
            assert refusal(lambda: ddp(batch(0))) == forward
        assert refusal(ddp._check_reducer_finalized) == forward
        setter = refusal(lambda: setattr(ddp, "require_manual_backward_finalization", False))
        assert setter.startswith("RuntimeError: require_manual_backward_finalization cannot change")
        ddp.finalize_backward()
        run_backward(ddp, group)
        ddp.finalize_backward()

    fddp.loopback(2, run)


def test_calls_without_a_step_are_refused() -> None:
    def run(group: Any) -> None:
        ddp = DDP(net(), process_group=group)
        said = refusal(ddp.finalize_backward)
        assert said.startswith("RuntimeError: finalize_backward() was called, but manual backward")
        ddp.require_manual_backward_finalization = True
        unused = [refusal(ddp.finalize_backward)]
        loss = ddp(batch(0)).sum()
        ddp.require_manual_backward_finalization = True  # as it is
        setter = refusal(lambda: setattr(ddp, "require_manual_backward_finalization", False))
        assert setter.startswith("RuntimeError: require_manual_backward_finalization cannot change")
        unused.append(refusal(ddp.finalize_backward))
        loss.backward()
        ddp.finalize_backward()
        unused.append(refusal(ddp.finalize_backward))
        with ddp.no_sync():
            run_backward(ddp, group)
            unused.append(refusal(ddp.finalize_backward))
        ddp.require_manual_backward_finalization = False
        run_backward(ddp, group)
        assert all("no step requires finalization" in text for text in unused)

    fddp.loopback(2, run)


def test_passes_that_do_not_belong_to_the_step_are_refused() -> None:
    """A second pass, a hook that finalizes before it may, and a pass of the module alone. The
    first two leave the step alone."""

    def run(group: Any) -> None:
        wanted = train(group, {}, False)[0]
        ddp = manual(group)
        first, second = (ddp(batch(group.rank, step)).square().mean() for step in (0, 1))
        first.backward()
        said = refusal(second.backward)
        assert said.startswith("RuntimeError: Expected to have finalized the prior backward pass")
        ddp.finalize_backward()
        assert same_bits([grads(ddp.module), wanted])

        ddp, early = manual(group), []
        hidden = ddp(batch(group.rank))
        for layer in ddp.module.layers.values():
            layer.weight.register_post_accumulate_grad_hook(
                lambda _: early.append(refusal(ddp.finalize_backward))
            )
        hidden.square().mean().backward()
        ddp.finalize_backward()
        assert "was called before all parameters had their gradients: layers.l0." in early[0]
        assert "should_finalize_after_backward" in early[0]
        assert same_bits([grads(ddp.module), wanted])

        ddp = manual(group)
        run_backward(ddp, group)
        ddp.module(batch(0)).sum().backward()
        said = refusal(ddp.finalize_backward)
        assert "gradients arrived between a backward pass and its finalize_backward()" in said
        ddp.zero_grad()
        run_backward(ddp, group)
        ddp.finalize_backward()
        assert same_bits([grads(ddp.module), wanted])

    fddp.loopback(2, run)


def test_a_hook_may_finalize_within_backward() -> None:
    """At the last gradient before that of the input, where that is allowed."""

    def run(group: Any) -> None:
        ddp = manual(group, bucket_cap_mb=TINY_CAP_MB)
        for step in range(3):
            ddp.zero_grad()
            done: list[dict[str, Any]] = []
            late: list[bool] = []

            def finalize(done: list[dict[str, Any]] = done) -> None:
                ddp.finalize_backward()
                done.append(grads(ddp.module))

            x = batch(group.rank, step).requires_grad_()
            inputs = call_in_backward(x, lambda late=late, f=finalize: None if late else f())
            loss = ddp(inputs).square().mean()
            is_late = ddp.should_finalize_after_backward
            assert is_late == (step == 0)
            late += [True] * is_late
            loss.backward()
            assert bool(done) != is_late
            if is_late:
                finalize()
            assert same_bits([done[0], grads(ddp.module)])

    fddp.loopback(2, run)


MIXED = torch.nn.parallel.distributed._MixedPrecision(param_dtype=torch.float64)


@pytest.mark.parametrize(
    ("options", "through", "wanted"),
    [
        ({}, (0, 1, 2), [True, False, False, False]),
        ({"static_graph": True}, (0, 2), [True, True, True, False]),
        ({"find_unused_parameters": True}, (0, 1, 2), [True, True, True, False]),
        ({"mixed_precision": MIXED}, (0, 1, 2), [True, True, True, False]),
    ],
    ids=["plain", "unused", "find unused", "mixed"],
)
def test_when_to_finalize(
    options: dict[str, Any], through: tuple[int, ...], wanted: list[bool]
) -> None:
    def run(group: Any) -> list[bool]:
        ddp, found = manual(group, **options), []
        for step in range(3):
            loss = ddp(batch(group.rank, step), through=through).square().mean()
            found.append(ddp.should_finalize_after_backward)
            loss.backward()
            ddp.finalize_backward()
        ddp.require_manual_backward_finalization = False
        return [*found, ddp.should_finalize_after_backward]

    assert fddp.loopback(2, run) == [wanted] * 2


# Failures


@pytest.mark.parametrize("in_step", [False, True])
def test_exceptions_before_finalization(in_step: bool) -> None:
    """Rank 1 raises after backward, before it would finalize."""

    def run(group: Any) -> tuple[str, list[dict[str, Any]]]:
        ddp = manual(group)

        def step() -> None:
            run_backward(ddp, group)
            if group.rank == 1:
                raise ValueError("no update here")
            ddp.finalize_backward()

        def whole_step() -> None:
            with ddp.in_step():
                step()

        said = refusal(whole_step if in_step else step)
        if group.rank == 1 and not in_step:
            ddp.finalize_backward()
        found = [grads(ddp.module)]
        ddp.zero_grad()
        run_backward(ddp, group)
        ddp.finalize_backward()
        return said, [*found, grads(ddp.module)]

    (said, good), (own, _) = fddp.loopback(2, run)
    assert own == "ValueError: no update here"
    if in_step:
        assert said.startswith("PeerError: ")
        assert own in said
        assert set(good[0].values()) == {None}
    else:
        assert said == ""
        assert same_bits(good)


# Copies, and options that exclude it


def copied(rank: int, world_size: int) -> tuple[bool, bool]:
    other = copy.deepcopy(manual(None, lazy_bucket_allocation=True))
    return other.require_manual_backward_finalization, other.lazy_bucket_allocation


def test_copies_keep_the_setting(ranks: RankPool) -> None:
    assert ranks.run(1, copied) == [(True, True)]


def test_delayed_parameters_alone_are_refused() -> None:
    def run(group: Any) -> None:
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
        assert setter == refusal(ddp.finalize_backward)
        assert setter.startswith("RuntimeError: Manual backward finalization is not supported")
        assert not ddp.should_finalize_after_backward

    fddp.loopback(2, run)


# Lazy allocation


def test_lazy_buckets_are_allocated_late_and_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before the last gradient of a bucket, and not kept after the step."""
    out: list[object] = []  # keys of buffers that are in use
    acquire, release = BufferPool.acquire, BufferPool.release

    def acquiring(self: BufferPool, key: Any, *args: Any) -> Tensor:
        out.append(key)
        return acquire(self, key, *args)

    def releasing(self: BufferPool, key: Any, buffer: Tensor) -> None:
        out.remove(key)
        release(self, key, buffer)

    monkeypatch.setattr(BufferPool, "acquire", acquiring)
    monkeypatch.setattr(BufferPool, "release", releasing)

    def run(group: Any, lazy: bool) -> tuple[int, bool]:
        layers = [nn.Linear(256, 256, bias=False) for _ in range(3)]
        ddp = DDP(
            nn.Sequential(*layers),
            process_group=group,
            bucket_cap_mb=0.25,
            lazy_bucket_allocation=lazy,
        )
        at_first: list[int] = []
        node = get_gradient_edge(layers[2].weight).node
        node.register_prehook(lambda _: at_first.append(len(out)))
        for _ in range(3):
            ddp(torch.ones(1, 256)).sum().backward()
        assert not out
        return at_first[-1], bool(ddp.steps.engine._pool.released())

    assert fddp.loopback(1, run, False) == [(3, True)]
    assert fddp.loopback(1, run, True) == [(0, False)]


# Beside stock DDP


@pytest.mark.skipif(not hasattr(StockDDP, "finalize_backward"), reason="new in torch 2.15")
@beside_stock()
def test_calls_in_and_out_of_turn_as_with_stock(wrapped: Any, rank: int) -> Iterator[Any]:
    """Values, or types of errors."""
    found: list[Any] = []

    def note(call: Callable[[], Any]) -> None:
        said = refusal(lambda: found.append(call()))
        if said:
            found.append(said.partition(":")[0])

    ddp: Any = wrapped(net())

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
    yield from found
