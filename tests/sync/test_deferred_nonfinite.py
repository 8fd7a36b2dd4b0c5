"""Policies for non-finite numbers under `report="next"`: those of `report="now"`, but for one table
(docs/guide/steps.md)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fddp
from tests.support.endings import ending
from tests.support.pairwise import pairwise

RANKS = 2
NAN, INF = math.nan, math.inf
PARAMS = {"w": torch.zeros(4, 3), "half": torch.zeros(5, dtype=torch.bfloat16), "b": torch.zeros(6)}
CAPS: dict[str, Any] = {"bucket_cap_mb": 3e-5, "first_bucket_mb": 1e-5}
LATER: dict[str, Any] = {"report": "next", **CAPS}

KINDS: dict[str, dict[str, Any]] = {
    "a tree": {},
    "wide sums": {"reduce_dtype": torch.float32},
    "hierarchical": {"mesh": fddp.Topology(a=1, b=2), "algorithm": "hierarchical"},
    "deterministic": {"deterministic": True},
    "virtual ranks": {"virtual_ranks": 4},
    "a local leaf": {"select": lambda path: path != "b"},
    "a sparse leaf": {"sparse": ["w"]},
    "shards": {"algorithm": "reduce_scatter"},
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "summed first": {"scaling": "after"},
    "shards of several parts": {"algorithm": "reduce_scatter", "split_mb": 2e-5},
}

SPOILED: dict[str, dict[int, dict[str, float]]] = {
    "nothing": {},
    "NaN": {1: {"w": NAN}},
    "opposite infinities": {0: {"b": INF}, 1: {"b": -INF}},
    "an infinity": {0: {"half": INF}},
    "two leaves": {0: {"half": INF}, 1: {"w": NAN}},
    "large numbers": {0: {"b": 3e38}, 1: {"b": 3e38}},  # whose sum overflows, and mean does not
}
"""First elements of gradients, by rank and leaf."""


class Case(NamedTuple):
    kind: str
    call: str
    spoiled: str
    policy: str


def is_valid(row: tuple[str, ...]) -> bool:
    case = Case(*row)
    # Of a sparse leaf, only whole trees are made here, and virtual ranks have trees of their own.
    return case.kind not in ("a sparse leaf", "virtual ranks") or case.call == "a call"


CALLS = ["a call", "in place", "a loss", "in flight"]
CASES = pairwise([*KINDS, *SCHEDULES], CALLS, [*SPOILED], ["skip", "raise"], valid=is_valid)


def grads(rank: int, step: int, spoiled: str = "nothing") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    made = {n: torch.randn(p.shape, generator=generator).to(p.dtype) for n, p in PARAMS.items()}
    for name, number in SPOILED[spoiled].get(rank, {}).items():
        made[name].view(-1)[0] = number
    return made


def loss(params: dict[str, Tensor], own: dict[str, Tensor]) -> Tensor:
    """Has the gradients `own`."""
    return torch.stack([(params[name] * own[name]).float().sum() for name in own]).sum()


def opened(group: Any, kind: str, **options: Any) -> fddp.GradSync:
    if kind in SCHEDULES:
        schedule = fddp.make_schedule(fddp.plan_buckets(PARAMS, **CAPS), RANKS, **SCHEDULES[kind])
        return fddp.GradSync(schedule, group=group, **options)
    return fddp.GradSync(PARAMS, group=group, **CAPS, **KINDS[kind], **options)


def step_of(sync: fddp.GradSync, case: Case, number: int, spoiled: str) -> Any:
    """Results of a step."""
    own: Any = grads(sync.rank, number, spoiled)
    if case.kind == "virtual ranks":
        own = sync.virtual_batches(lambda virtual: grads(virtual, number, spoiled))
    if case.kind == "a sparse leaf":
        own["w"] = own["w"].to_sparse(1)
    if case.call == "a loss":
        return sync.value_and_grad(loss)(PARAMS, own)[1]
    if case.kind.startswith("shards"):
        return sync.reduce_scatter(own)
    if case.call == "in flight":
        return sync.start(own).wait()
    return sync.reduce_(own) if case.call == "in place" else sync(own)


def outcome(sync: fddp.GradSync, report: str, take: Callable[[], Any]) -> Any:
    """Outcome of a step, in the terms of `report="now"`."""
    try:
        tree = take()
        sync.check()
    except fddp.NonFiniteError as error:
        return "raised", error.step, sorted(error.leaves)
    leaves = [*tree.values()]
    if all(leaf is None for leaf in leaves):
        return "skipped"
    whole = [leaf.to_dense() for leaf in leaves]
    if report == "next":
        found = sync.found_inf
        assert found is not None
        assert (found.shape, found.dtype) == ((), torch.float32)
        if found.item() == 1.0:
            assert not any(leaf.count_nonzero() for leaf in whole)
            return "skipped"
        assert found.item() == 0.0
    return repr([leaf.tolist() for leaf in whole])


def outcomes(group: Any, case: Case, report: str) -> list[Any]:
    """Of a good step, a spoiled one and a good one."""
    found = []
    with opened(group, case.kind, nonfinite=case.policy, report=report) as sync:
        for number in range(3):
            spoiled = case.spoiled if number == 1 else "nothing"
            found.append(outcome(sync, report, partial(step_of, sync, case, number, spoiled)))
    return found


@pytest.mark.parametrize("row", CASES, ids="-".join)
def test_policies_are_those_of_reports_at_once(row: tuple[str, ...]) -> None:
    case = Case(*row)
    now, later = (fddp.loopback(RANKS, outcomes, case, report) for report in ("now", "next"))
    assert later == now
    is_bad = case.spoiled not in ("nothing", "large numbers")
    if case.kind != "a local leaf" and is_bad:
        assert now[0][1] == "skipped" or now[0][1][0] == "raised"


def test_the_flag_is_a_value_of_its_step() -> None:
    def take(group: Any) -> list[Any]:
        with fddp.GradSync(PARAMS, group=group, nonfinite="skip", **LATER) as sync:
            before = sync.found_inf
            sync(grads(group.rank, 0, "NaN"))
            kept = sync.found_inf
            sync(grads(group.rank, 0))
            return [before, kept.item(), sync.found_inf.item()]  # type: ignore[union-attr]

    assert fddp.loopback(RANKS, take) == [[None, 1.0, 0.0]] * RANKS


def test_local_gradients_may_share_memory() -> None:
    def take(group: Any) -> list[list[float]]:
        options: Any = {"select": lambda path: path == "w", "nonfinite": "skip", **LATER}
        params = {"w": torch.zeros(2), "b": torch.zeros(3)}
        with fddp.GradSync(params, group=group, **options) as sync:
            step = sync.value_and_grad(lambda p: p["w"].sum() * NAN + p["b"].sum())
            _, found = step(params)
            return [found["w"].tolist(), found["b"].tolist()]

    assert fddp.loopback(RANKS, take) == [[[0.0] * 2, [0.0] * 3]] * RANKS


def test_the_flag_outlives_the_inference_mode_of_the_caller() -> None:
    def take(group: Any) -> bool:
        with fddp.GradSync(PARAMS, group=group, nonfinite="skip", **LATER) as sync:
            with torch.inference_mode():
                sync(grads(group.rank, 0))
            return sync.found_inf.is_inference()  # type: ignore[union-attr]

    assert fddp.loopback(RANKS, take) == [False] * RANKS


def test_an_all_gather_keeps_the_flag_of_the_gradients() -> None:
    def take(group: Any) -> tuple[float, bool]:
        options: Any = {"algorithm": "reduce_scatter", "nonfinite": "skip", **LATER}
        params = {"w": torch.tensor([INF, 1.0])}  # parameters may be infinite
        with fddp.GradSync(params, group=group, **options) as sync:
            sync.reduce_scatter({"w": torch.tensor([NAN, NAN])})  # in the shards of both ranks
            whole = sync.all_gather(sync.shard(params))
            return sync.found_inf.item(), torch.equal(whole["w"], params["w"])  # type: ignore[union-attr]

    assert fddp.loopback(RANKS, take) == [(1.0, True)] * RANKS


def informed(group: Any, report: Any) -> list[Any]:
    seen: list[Any] = []
    with fddp.GradSync(PARAMS, group=group, nonfinite="skip", report=report, **CAPS) as sync:
        for number, spoiled in enumerate(["nothing", "an infinity", "nothing"]):
            _, info = sync(grads(group.rank, number, spoiled), with_info=True)
            seen.append((info.skipped, info.all_finite, str(info.grad_norm)))
    return seen


def test_info_is_that_of_reports_at_once() -> None:
    now, later = (fddp.loopback(RANKS, informed, report) for report in ("now", "next"))
    assert now == later
    assert [skipped for skipped, *_ in later[0]] == [False, True, False]


# Errors


def noticed(group: Any, notice: str) -> tuple[list[str], str]:
    """Kinds of errors of the spoiled step and the next calls, and the text of the first error."""
    with fddp.GradSync(PARAMS, group=group, nonfinite="raise", **LATER) as sync:
        step = sync.value_and_grad(loss)
        step(PARAMS, grads(group.rank, 0))
        calls: list[Callable[[], Any]] = [lambda: step(PARAMS, grads(group.rank, 1, "two leaves"))]
        if notice == "info of one rank" and group.rank == 0:
            calls = [lambda: sync(grads(group.rank, 1, "two leaves"), with_info=True)]
        elif notice == "info of one rank":
            calls = [lambda: sync(grads(group.rank, 1, "two leaves"))]
        calls.append(sync.check if notice == "check" else lambda: step(PARAMS, grads(0, 2)))
        calls.append(lambda: step(PARAMS, grads(0, 3)))
        found = [ending(call) for call in calls]
    return [each.kinds[0] for each in found], next(each.text for each in found if each.text)


@pytest.mark.parametrize("notice", ["the next step", "check", "info of one rank"])
def test_errors_arrive_with_the_next_call_on_all_ranks(notice: str) -> None:
    (first, text), (second, other) = fddp.loopback(RANKS, noticed, notice)
    at_once = "NonFiniteError" if notice == "info of one rank" else "no error"
    assert first == [at_once, "NonFiniteError", "no error"]
    assert second == ["no error", "NonFiniteError", "no error"]
    assert text == other
    assert text.startswith("step 1: results have NaN or infinity in leaf 'half', leaf 'w'.")


def test_closing_raises() -> None:
    def close(group: Any) -> str:
        sync = fddp.GradSync(PARAMS, group=group, nonfinite="raise", **LATER)
        sync(grads(group.rank, 0, "NaN"))
        return ending(sync.close).kinds[0]

    assert fddp.loopback(RANKS, close) == ["NonFiniteError"] * RANKS


def within_another(group: Any) -> list[str]:
    spoiled = iter(["nothing", "NaN", "nothing"])
    with fddp.GradSync(PARAMS, group=group, nonfinite="raise", **LATER) as sync:
        inner = sync.value_and_grad(loss)

        def outer_loss(params: Any) -> Tensor:
            inner(params, grads(group.rank, 0, next(spoiled)))
            return loss(params, grads(group.rank, 1))

        outer = sync.value_and_grad(outer_loss)
        kinds = [ending(lambda: outer(PARAMS)).kinds[0] for _ in range(2)]
        return [*kinds, ending(sync.check).kinds[0], ending(lambda: outer(PARAMS)).kinds[0]]


def test_a_step_within_another_raises_at_once() -> None:
    """And fails the other one, on all ranks."""
    later = "PeerError"
    expected = ["no error", "NonFiniteError", later, "no error"]
    assert fddp.loopback(RANKS, within_another) == [expected] * RANKS


class Failing(NamedTuple):
    """Kinds of errors of a step in which rank 1 fails, of `check`, and of the next step."""

    step: str
    check: str
    after: str


def failing(group: Any, algorithm: str, policy: str) -> Failing:
    def raising(params: Any, own: Any) -> Tensor:
        raise ArithmeticError("a bad batch")

    options: Any = {"algorithm": algorithm, "nonfinite": policy}
    with fddp.GradSync(PARAMS, group=group, **options, **LATER) as sync:
        step = sync.value_and_grad(loss if group.rank == 0 else raising)
        usual = sync.value_and_grad(loss)
        calls = (
            lambda: step(PARAMS, grads(0, 0, "two leaves")),
            sync.check,
            lambda: usual(PARAMS, grads(0, 0)),
        )
        return Failing(*[ending(call).kinds[0] for call in calls])


@pytest.mark.parametrize("policy", ["skip", "raise"])
@pytest.mark.parametrize("algorithm", ["all_reduce", "reduce_scatter"])
def test_a_rank_that_fails_takes_part_in_the_sum_of_flags(algorithm: str, policy: str) -> None:
    """Its error comes before that of numbers."""
    first, second = fddp.loopback(RANKS, failing, algorithm, policy)
    assert first == Failing("no error", "PeerError", "no error")
    assert second == Failing("ArithmeticError", "PeerError", "no error")


# The wrapper


class Spoiling(torch.autograd.Function):
    """The identity, with a gradient times a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * ctx.factor, None


MODEL = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
STEPS, BAD = 15, (3, 13)  # the first are measured, and read their report at once


def train(group: Any, report: Any, accumulates: bool, views: bool) -> Any:
    model = copy.deepcopy(MODEL)
    ddp = fddp.DistributedDataParallel(
        model,
        process_group=group,
        report=report,
        nonfinite="skip",
        bucket_cap_mb=1e-5,
        gradient_as_bucket_view=views,
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
    generator = torch.Generator().manual_seed(group.rank)
    skipped = []

    def backward(factor: float) -> None:
        x = torch.randn(8, 3, generator=generator)
        Spoiling.apply(ddp(x), factor).square().sum().backward()

    for number in range(STEPS):
        optimizer.zero_grad()
        factor = NAN if number in BAD and group.rank == 1 else 1.0
        if accumulates:
            with ddp.no_sync():
                backward(factor)
            backward(1.0)
        else:
            backward(factor)
        if report == "next":
            assert all(p.grad is not None for p in model.parameters())
            assert ddp.skipped is (number in BAD)
            assert not ddp.skipped or not any(p.grad.any() for p in model.parameters())
            optimizer.found_inf = ddp.found_inf  # type: ignore[attr-defined]
        optimizer.step()
        skipped.append(ddp.skipped)
    ddp.check()
    assert [number for number, flag in enumerate(skipped) if flag] == [*BAD]
    return [p.tolist() for p in model.parameters()]


@pytest.mark.parametrize(("accumulates", "views"), [(False, False), (True, True)])
def test_wrapped_modules_train_as_with_reports_at_once(accumulates: bool, views: bool) -> None:
    """With an optimizer that takes the flag."""
    now, later = (
        fddp.loopback(RANKS, train, report, accumulates, views) for report in ("now", "next")
    )
    assert now == later


def wrapped_raises(group: Any) -> tuple[list[str], str]:
    ddp = fddp.DistributedDataParallel(
        copy.deepcopy(MODEL), process_group=group, report="next", nonfinite="raise"
    )

    def step(number: int) -> None:
        factor = INF if number == 12 and group.rank == 1 else 1.0
        ddp.zero_grad()
        with ddp.in_step():
            Spoiling.apply(ddp(torch.ones(8, 3)), factor).square().sum().backward()

    found = []
    for number in range(15):
        found.append(ending(partial(step, number)))
        assert not ddp.skipped
    assert ending(ddp.check).kinds[0] == "no error"
    assert ddp.found_inf is not None
    return [each.kinds[0] for each in found], found[13].text


def test_wrapped_modules_raise_in_the_next_step() -> None:
    for kinds, text in fddp.loopback(RANKS, wrapped_raises):
        assert kinds == ["no error"] * 13 + ["NonFiniteError", "no error"]
        assert text.startswith("step 12: results have NaN or infinity in leaf '0.bias'")
        assert "and more in 1 others" in text
