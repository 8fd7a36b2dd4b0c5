"""`report="next"`: the same results, and errors that come with the next call."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fddp
from tests.support.endings import Ending, ending

RANKS = 2
PARAMS = {"w": torch.zeros(4, 3), "half": torch.zeros(5, dtype=torch.bfloat16), "b": torch.zeros(6)}

# With the word behind the last bucket, and by itself.
PLACES = pytest.mark.parametrize("piggyback", [True, False])


def schedule(piggyback: bool, **options: Any) -> fddp.Schedule:
    plan = fddp.plan_buckets(PARAMS, bucket_cap_mb=3e-5, first_bucket_mb=1e-5)
    return fddp.make_schedule(plan, RANKS, piggyback=piggyback, **options)


def grads(rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return fddp.tree_map(lambda p: torch.randn(p.shape, generator=generator).to(p.dtype), PARAMS)


def loss(params: dict[str, Tensor], x: float) -> Tensor:
    total = torch.zeros(())
    for name in sorted(params):  # in an order for which the plan changes
        total = total + (params[name].float() * x).sin().sum()
    return total


def loss_of_rows(params: dict[str, Tensor], x: float) -> Tensor:
    """As `loss`, of some rows of a table alone."""
    rows = torch.nn.functional.embedding(torch.tensor([int(x) % 4, 1]), params["w"], sparse=True)
    return loss({**params, "w": rows}, x)


# Results

KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "a tree": lambda: {"bucket_cap_mb": 3e-5, "first_bucket_mb": 1e-5},
    "hierarchical": lambda: {"mesh": fddp.Topology(a=1, b=2), "algorithm": "hierarchical"},
    "deterministic": lambda: {"deterministic": True},
    "virtual ranks": lambda: {"virtual_ranks": 4},
    "a local leaf": lambda: {"select": lambda path: path != "b"},
    "a sparse leaf": lambda: {"sparse": ["w"]},
    "separate word": lambda: {"source": schedule(False)},
    "scaled after": lambda: {"source": schedule(False, scaling="after")},
    "averaged": lambda: {"source": schedule(False, scaling="average")},
}


def results(group: Any, kind: str, report: Any) -> list[Any]:
    options = KINDS[kind]()
    source = options.pop("source", PARAMS)
    with fddp.GradSync(source, group=group, report=report, **options) as sync:
        step = sync.value_and_grad(loss_of_rows if kind == "a sparse leaf" else loss)
        found: list[Any] = []
        for number in range(4):
            batch: Any = 1.0 + group.rank + number
            if kind == "virtual ranks":
                batch = sync.virtual_batches(float)
            found.append(step(PARAMS, batch))
            if kind not in ("virtual ranks", "a sparse leaf"):
                found.append(sync(grads(group.rank, number)))
        return [fddp.tree_map(lambda leaf: leaf.to_dense().tolist(), found), sync.plan.to_json()]


@pytest.mark.parametrize("kind", KINDS)
def test_results_and_plans_are_those_of_reports_at_once(kind: str) -> None:
    now, later = (fddp.loopback(RANKS, results, kind, report) for report in ("now", "next"))
    assert now == later


def shards(group: Any, report: Any) -> Any:
    options: Any = {"group": group, "algorithm": "reduce_scatter", "report": report}
    with fddp.GradSync({"w": PARAMS["w"]}, **options) as sync:
        own = [sync.reduce_scatter({"w": grads(group.rank, step)["w"]}) for step in range(2)]
        return [sync.all_gather(shard)["w"].tolist() for shard in own]


def test_shards_are_those_of_reports_at_once() -> None:
    assert fddp.loopback(RANKS, shards, "now") == fddp.loopback(RANKS, shards, "next")


def test_info_is_that_of_its_step() -> None:
    def take(group: Any) -> tuple[int, int, float]:
        with fddp.GradSync(schedule(False), group=group, report="next") as sync:
            sync(grads(group.rank, 0))
            _, _, info = sync.value_and_grad(loss, with_info=True)(PARAMS, 1.0)
            return info.step, info.active, info.total_weight

    assert fddp.loopback(RANKS, take) == [(1, 2, 2.0)] * RANKS


@pytest.mark.parametrize("is_wide", [False, True])  # results are views of buckets, or casts
def test_no_gradient_is_kept_for_a_report(is_wide: bool) -> None:
    source = schedule(False, reduce_dtype="float32" if is_wide else None)

    def take(group: Any) -> list[bool]:
        alive = []
        with fddp.GradSync(source, group=group, report="next") as sync:
            for step in range(3):
                own = grads(group.rank, step)
                found: dict[str, Tensor] = {}
                if step == 0:
                    found = sync.value_and_grad(loss)(PARAMS, 1.0)[1]
                elif step == 1:
                    found = sync(own)
                else:  # which this rank fails, or another one
                    ending(partial(sync, own, weight=1.0 + group.rank))
                refs = [weakref.ref(leaf) for leaf in [*own.values(), *found.values()]]
                assert sync._engine._unread is not None
                del own, found
                gc.collect()
                alive.append(any(ref() is not None for ref in refs))
            assert ending(sync.check).kinds[0] in ("PeerError", "WeightError")
        return alive

    assert fddp.loopback(RANKS, take) == [[False] * 3] * RANKS


# Errors

STEP = 2  # of the rank that deviates


class Deviation(NamedTuple):
    """Step of rank 1 that no other rank takes.

    Attributes:
        act: takes the step.
        kind: error of rank 1 in this step.
        text: in the error of the next call.
        later: kind of this error, on all ranks.
    """

    act: Callable[[fddp.GradSync], Any]
    kind: str
    text: str
    later: str = "PeerError"


def without(name: str) -> dict[str, Tensor | None]:
    return {key: None if key == name else leaf for key, leaf in grads(1, STEP).items()}


def raising(params: Any, x: float) -> Tensor:
    raise ArithmeticError("a bad batch")


def ahead(sync: fddp.GradSync) -> Any:
    sync._engine.step += 1
    return sync(grads(1, STEP))


DEVIATIONS = {
    "missing": Deviation(
        lambda sync: sync(without("w")), "NoGradientError", "leaf 'w' has no gradient"
    ),
    "weight": Deviation(
        lambda sync: sync(grads(1, STEP), weight=2.0), "WeightError", "the weight is 2.0"
    ),
    "loss": Deviation(
        lambda sync: sync.value_and_grad(raising)(PARAMS, 1.0), "ArithmeticError", "a bad batch"
    ),
    "tree": Deviation(lambda sync: sync({"w": PARAMS["w"]}), "TreeMismatchError", "missing: 'b'"),
    "step": Deviation(ahead, "no error", "at step 3", "DesyncError"),
}
NOTICED = {
    "the next step": lambda sync: sync(grads(0, 0)),
    "check": lambda sync: sync.check(),
    "closing": lambda sync: sync.close(),
    "a hook": lambda sync: sync._engine.set_hook(None),
    "tuning": lambda sync: sync.tune(sync.value_and_grad(loss), PARAMS, 1.0),
    "a rebuild": lambda sync: sync.rebuild(sync.group),
}


def deviate(group: Any, name: str, notice: str, piggyback: bool) -> tuple[Ending, Ending, str]:
    """Outcomes of the step and of the next call, and what comes after."""
    sync = fddp.GradSync(schedule(piggyback), group=group, report="next")
    step = sync.value_and_grad(loss)

    def usual(number: int) -> Any:
        return step(PARAMS, 1.0)[1] if name == "loss" else sync(grads(group.rank, number))

    for number in range(STEP):
        usual(number)
    is_odd = group.rank == 1
    first = ending(lambda: DEVIATIONS[name].act(sync) if is_odd else usual(STEP))
    then = ending(lambda: NOTICED[notice](sync))
    if notice == "closing" or name == "step":
        return first, then, ""
    with sync:
        fits = torch.equal(usual(0)["w"], usual(0)["w"])
    return first, then, "well" if fits else "other results"


@PLACES
@pytest.mark.parametrize("name", DEVIATIONS)
def test_errors_arrive_with_the_next_call_on_all_ranks(name: str, piggyback: bool) -> None:
    """By the number of their step; on the rank that fails also in the step itself."""
    deviation = DEVIATIONS[name]
    for notice in NOTICED if name == "missing" else ["the next step"]:
        seen = fddp.loopback(RANKS, deviate, name, notice, piggyback)
        (first, then, after), (own, own_then, own_after) = seen
        assert first.kinds[0] == "no error", first
        assert own.kinds[0] == deviation.kind, own
        for outcome in (then, own_then):
            assert outcome.kinds[0] == deviation.later, (notice, outcome)
            assert f"step {STEP}" in outcome.text, outcome
            assert deviation.text in outcome.text, outcome
            assert "no mean over ranks: go back" in outcome.text, outcome
        assert after == own_after == ("" if notice == "closing" or name == "step" else "well")


def test_a_block_that_raises_waits_for_no_report() -> None:
    """Its own error leaves it, whatever other ranks have reported; theirs is the cause of the error
    that they then raise."""

    def leave(group: Any) -> tuple[str, str]:
        try:
            with fddp.GradSync(schedule(False), group=group, report="next") as sync:
                sync(grads(0, STEP) if group.rank == 0 else without("w"))
                raise KeyError("of the caller")
        except (KeyError, fddp.errors.FddpError) as error:
            return type(error).__name__, type(error.__cause__).__name__

    outcomes = fddp.loopback(RANKS, leave)
    assert outcomes == [("KeyError", "NoneType"), ("RankLostError", "NoGradientError")]


def weightless(group: Any) -> list[Ending]:
    with fddp.GradSync(PARAMS, group=group, report="next", virtual_ranks=4) as sync:
        step = sync.value_and_grad(loss)
        batches = sync.virtual_batches(lambda v: fddp.EXHAUSTED if v == 0 else float(v))
        return [ending(lambda: step(PARAMS, batches)), ending(sync.check)]


def test_a_virtual_rank_without_input_is_an_error() -> None:
    (own, own_then), (other, then) = fddp.loopback(RANKS, weightless)
    assert own.kinds[0] == "WeightError"
    assert other.kinds[0] == "no error"
    for outcome in (own_then, then):
        assert "the weight is 0.0" in outcome.text


def within_another(group: Any, piggyback: bool, catches: bool) -> list[str]:
    plan = [False, True, False, False]
    fails: list[bool] = []

    def inner_loss(params: Any, x: float) -> Tensor:
        return raising(params, x) if fails[-1] and group.rank == 1 else loss(params, x)

    with fddp.GradSync(schedule(piggyback), group=group, report="next") as sync:
        inner = sync.value_and_grad(inner_loss)

        def outer_loss(params: Any, x: float) -> Tensor:
            with contextlib.suppress(*[fddp.PeerError, ArithmeticError] if catches else []):
                inner(params, x)
            return loss(params, x)

        outer = sync.value_and_grad(outer_loss)
        kinds = []
        for each in plan:
            fails.append(each)
            kinds.append(ending(lambda: outer(PARAMS, 1.0)).kinds[0])
        return kinds


@PLACES
def test_a_step_within_another_reads_its_report_at_once(piggyback: bool) -> None:
    """The collectives of the outer step follow."""
    first, second = fddp.loopback(RANKS, within_another, piggyback, False)
    assert first == ["no error", "PeerError", "PeerError", "no error"]
    assert second == ["no error", "ArithmeticError", "PeerError", "no error"]
    assert fddp.loopback(RANKS, within_another, piggyback, True) == [["no error"] * 4] * RANKS


def tuned(group: Any) -> list[str]:
    calls = iter(range(1000))

    def sometimes(params: Any, x: float) -> Tensor:
        return raising(params, x) if next(calls) == 1 and group.rank == 1 else loss(params, x)

    with fddp.GradSync(PARAMS, group=group, report="next") as sync:
        step = sync.value_and_grad(sometimes)
        tune: Callable[[], Any] = lambda: sync.tune(step, PARAMS, 1.0, rounds=1)  # noqa: E731
        return [ending(call).kinds[0] for call in (tune, tune, lambda: step(PARAMS, 1.0))]


def test_tuning_fails_in_the_same_call_on_all_ranks() -> None:
    first, second = fddp.loopback(RANKS, tuned)
    assert first == ["PeerError", "no error", "no error"]
    assert second == ["ArithmeticError", "no error", "no error"]


# Options that need the report before results are used


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"hook": fddp.hooks.fp16_compress}, "leave out the hook, or report='next'"),
        ({"report": "later"}, "report must be one of now, next, got 'later'"),
    ],
)
def test_options_that_need_the_report_are_refused(options: dict[str, Any], text: str) -> None:
    def refuse(group: Any) -> Ending:
        given = {"report": "next", **options}
        return ending(lambda: fddp.GradSync(PARAMS, group=group, **given))

    for own in fddp.loopback(RANKS, refuse):
        assert own.kinds[0] == "ValueError", own
        assert text in own.text, own


def test_hooks_are_refused_later_too() -> None:
    def refuse(group: Any) -> Ending:
        with fddp.GradSync(PARAMS, group=group, report="next") as sync:
            return ending(lambda: sync._engine.set_hook(fddp.hooks.bf16_compress))

    for own in fddp.loopback(RANKS, refuse):
        assert own.kinds[0] == "ValueError", own


def test_loops_over_uneven_inputs_are_refused() -> None:
    def refuse(group: Any) -> Ending:
        with fddp.GradSync(PARAMS, group=group, report="next") as sync:
            return ending(lambda: next(iter(fddp.uneven([1], sync))))

    for own in fddp.loopback(RANKS, refuse):
        assert own.kinds[0] == "ValueError", own
        assert "report='now'" in own.text, own


# The wrapper


MODEL = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))


def train(group: Any, report: Any) -> list[Any]:
    model = copy.deepcopy(MODEL)
    ddp = fddp.DistributedDataParallel(
        model, process_group=group, report=report, bucket_cap_mb=1e-5
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(group.rank)
    for _ in range(4):
        optimizer.zero_grad()
        ddp(torch.randn(8, 3, generator=generator)).square().sum().backward()
        optimizer.step()
    ddp.check()
    return [p.tolist() for p in model.parameters()]


def test_wrapped_modules_train_as_with_reports_at_once() -> None:
    assert fddp.loopback(RANKS, train, "now") == fddp.loopback(RANKS, train, "next")


class Aborted(torch.autograd.Function):
    """Its backward pass raises if it is told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, aborts: bool) -> Tensor:
        ctx.aborts = aborts
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if ctx.aborts:
            raise ArithmeticError("within backward")
        return grads[0], None


class Gated(torch.nn.Module):
    """Uses its second layer if asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        self.norm = torch.nn.BatchNorm1d(2)  # its buffers are broadcast in forward

    def forward(self, x: Tensor, both: bool, aborts: bool = False) -> Tensor:
        y: Tensor = self.norm(Aborted.apply(self.first(x), aborts))
        return y + self.second(x) if both else y


def wrapped_misses(group: Any) -> tuple[Ending, Ending, Ending]:
    ddp = fddp.DistributedDataParallel(Gated(), process_group=group, report="next")

    def step(both: bool) -> None:
        ddp(torch.ones(3, 2), both).sum().backward()

    for _ in range(12):  # the first are measured, and read their report at once
        step(True)
    missing = ending(lambda: step(group.rank == 0))
    following = ending(lambda: step(True))
    step(True)
    return missing, following, ending(ddp.check)


def test_wrapped_modules_raise_in_the_next_forward_pass() -> None:
    seen = fddp.loopback(RANKS, wrapped_misses)
    assert [own[0].kinds[0] for own in seen] == ["no error", "NoGradientError"], seen
    for _, following, checked in seen:
        assert following.kinds[0] == "PeerError", following
        assert "rank 1 failed at step 12" in following.text
        assert checked.kinds[0] == "no error", checked


def wrapped_raises(group: Any, where: str) -> list[str]:
    """Kinds of errors of steps, in the third of which rank 1 raises."""
    ddp = fddp.DistributedDataParallel(Gated(), process_group=group, report="next")

    def step(fails: bool) -> None:
        with ddp.in_step() if where == "block" else contextlib.nullcontext():
            y = ddp(torch.ones(3, 2), True, aborts=fails)
            if fails and where == "block":
                raise ArithmeticError("between forward and backward")
            y.sum().backward()

    for _ in range(12):
        step(False)
    plan = [number == 2 and group.rank == 1 for number in range(6)]
    return [ending(partial(step, fails)).kinds[0] for fails in plan]


@pytest.mark.filterwarnings("ignore:the step of an aborted backward pass")
@pytest.mark.parametrize("where", ["block", "backward"])
def test_wrapped_modules_go_on_after_an_exception(where: str) -> None:
    """Which other ranks take for no error of their next step."""
    first, second = fddp.loopback(RANKS, wrapped_raises, where)
    assert first == ["no error"] * 3 + ["PeerError"] + ["no error"] * 2
    assert second == ["no error"] * 2 + ["ArithmeticError", "PeerError"] + ["no error"] * 2


@pytest.mark.parametrize(
    "name", ["find_unused_parameters", "skip_all_reduce_unused_params", "join"]
)
def test_wrappers_with_unused_parameters_are_refused(name: str) -> None:
    def refuse(group: Any) -> Ending:
        options: Any = {"process_group": group, "report": "next"}
        if name != "join":
            options[name] = True
        module = torch.nn.Linear(2, 2)
        return ending(lambda: fddp.DistributedDataParallel(module, **options).join())

    for own in fddp.loopback(RANKS, refuse):
        assert own.kinds[0] == "ValueError", own
        assert f"{name}{'()' if name == 'join' else ''} and report='next'" in own.text, own


def left_in_flight(group: Any) -> list[str]:
    ones = {"w": torch.ones(2)}
    with fddp.GradSync(ones, group=group, report="next") as sync:
        sync(ones)
        handle = sync.start(ones if group.rank == 0 else {"w": None})
        found = [ending(partial(sync, ones)), ending(sync.check), ending(partial(sync, ones))]
        del handle
        return [each.kinds[0] for each in found]


def test_the_report_of_a_step_in_flight_comes_with_the_next_call() -> None:
    assert fddp.loopback(RANKS, left_in_flight) == [["PeerError", "no error", "no error"]] * RANKS
