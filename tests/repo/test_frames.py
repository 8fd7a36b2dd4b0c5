"""Tracebacks of errors that callers cause: their own frames, and at most three of fddp."""

from __future__ import annotations

import dataclasses
import inspect
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fddp
from fddp.core.entrance import CALL_CODE
from fddp.sync.step_handle import StepHandle

MODULES = (
    *(fddp, fddp.averaging, fddp.hooks, fddp.numerics, fddp.periodic, fddp.testing, fddp.watch),
)
CLASSES = (
    *(fddp.Communicator, fddp.DistributedDataParallel, fddp.GradSync, fddp.VirtualSampler),
    *(fddp.averaging.Averager, fddp.periodic.PeriodicSync, fddp.watch.Monitor, StepHandle),
)

ONE = {"w": torch.ones(4)}
WRONG = {"w": torch.ones(3)}
PLAN = fddp.plan_buckets(ONE)
SCHEDULE = fddp.make_schedule(PLAN, 2)
OTHER = fddp.plan_buckets({"v": torch.ones(4)})
HALVES: dict[str, Any] = {"algorithm": "reduce_scatter"}


class Case(NamedTuple):
    """A mistake, and the functions of fddp that its traceback shows.

    Attributes:
        call: makes the mistake, given a loopback group.
        error: type of the error.
        entrance: the outermost function of fddp; "" if none is shown.
        noticed: the innermost one.
        inside: functions of the caller that fddp called.
        ranks: number of ranks. The error is that of the last one.
    """

    call: Callable[[Any], Any]
    error: type[Exception]
    entrance: str
    noticed: str
    inside: tuple[str, ...] = ()
    ranks: int = 1


def sync(group: Any, **options: Any) -> fddp.GradSync:
    return fddp.GradSync(ONE, group=group, **options)


def boom(*_: Any) -> Any:
    raise LookupError("no such key")


def loss(params: dict[str, Tensor]) -> Tensor:
    return params["w"].sum()


def pmean_of_integers(params: dict[str, Tensor], group: Any) -> Tensor:
    return fddp.pmean(params["w"].int(), group).sum()


def wrapped(group: Any, **options: Any) -> fddp.DistributedDataParallel:
    return fddp.DistributedDataParallel(torch.nn.Linear(2, 1), process_group=group, **options)


def closed(group: Any) -> fddp.GradSync:
    one = sync(group)
    one.close()
    return one


class Broken(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        boom()
        return x


def failing_hook(group: Any) -> None:
    ddp = wrapped(group)
    ddp.register_comm_hook(None, boom_hook)
    ddp(torch.ones(1, 2)).sum().backward()


def second_hook(group: Any) -> None:
    ddp = wrapped(group)
    ddp.register_comm_hook(None, boom_hook)
    ddp.register_comm_hook(None, boom_hook)


def boom_hook(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
    boom()
    return torch.futures.Future()


def in_step(group: Any) -> None:
    ddp = wrapped(group)
    with ddp.in_step():
        output = ddp(torch.ones(1, 2)).sum()
        if group.rank == 0:
            boom()
        output.backward()


def not_finite(group: Any) -> None:
    sync(group, nonfinite="raise")({"w": torch.full((4,), float("nan"))})


def nested(group: Any) -> None:
    one = sync(group)
    one.value_and_grad(lambda p: p["w"].sum() + one(WRONG)["w"].sum())(ONE)


def on_a_peer(group: Any) -> None:
    sync(group)(ONE if group.rank else WRONG)


def in_backward(group: Any) -> None:
    total = fddp.psum(torch.ones(4, requires_grad=True), group).sum()
    if group.rank:
        total.backward()
    else:
        fddp.pmean(ONE, group)


def broken_schedule() -> fddp.Schedule:
    return dataclasses.replace(SCHEDULE, ops=SCHEDULE.ops[:-1])


def batches() -> Any:
    yield torch.ones(4)
    boom()


def loop(group: Any) -> None:
    one = sync(group)
    step = one.value_and_grad(lambda p, x: (p["w"] * x).sum())
    for batch in fddp.uneven(batches(), one):
        step(ONE, batch)


def periodic_step(group: Any) -> None:
    with fddp.periodic.PeriodicSync(ONE, fddp.periodic.local_sgd(ONE, 1), group=group) as one:
        one.step(WRONG, one.init(ONE))


CASES: dict[str, Case] = {
    # GradSync
    "no gradients": Case(
        lambda g: fddp.GradSync({"n": torch.ones(2).int()}, group=g),
        fddp.NoGradientError,
        "__init__",
        "_selected",
    ),
    "an algorithm": Case(lambda g: sync(g, algorithm="tree"), ValueError, "__init__", "terms"),
    "a keyword": Case(lambda g: sync(g, bucket_cap=1), TypeError, "", ""),
    "a cap": Case(lambda g: sync(g, bucket_cap_mb=0), ValueError, "__init__", "_bytes"),
    "a group": Case(lambda g: sync(3), TypeError, "__init__", "resolve"),
    "a transport": Case(lambda g: sync(g, transport="tcp"), ValueError, "__init__", "terms"),
    "a hook": Case(lambda g: sync(g, hook=boom), TypeError, "__init__", "terms"),
    "a selection": Case(
        lambda g: sync(g, select=boom), LookupError, "__init__", "_selected", ("boom",)
    ),
    "a schedule": Case(
        lambda g: fddp.GradSync(SCHEDULE, group=g), ValueError, "__init__", "_schedule_topology"
    ),
    "other caps": Case(
        lambda g: sync(g, bucket_cap_mb=1.0 + g.rank),
        fddp.PlanMismatchError,
        "__init__",
        "check_equal",
        ranks=2,
    ),
    "a shape": Case(lambda g: sync(g)(WRONG), fddp.TreeMismatchError, "__call__", "matched_leaves"),
    "a shape on a peer": Case(on_a_peer, fddp.PeerError, "__call__", "_give_up", ranks=2),
    "a weight": Case(
        lambda g: sync(g)(ONE, weight=-1.0), fddp.WeightError, "__call__", "checked_weight"
    ),
    "no weight": Case(
        lambda g: sync(g)(ONE, weight=0.0), fddp.WeightError, "__call__", "_check_report"
    ),
    "a transform": Case(
        lambda g: torch.func.vmap(lambda x: sync(g)({"w": x}))(torch.ones(2, 4)),
        fddp.TransformError,
        "__call__",
        "check_no_transform",
    ),
    "after close": Case(lambda g: closed(g)(ONE), fddp.ClosedError, "__call__", "check_usable"),
    "not finite": Case(not_finite, fddp.NonFiniteError, "__call__", "_stopped"),
    "update": Case(
        lambda g: sync(g).update(ONE, 3), fddp.TreeMismatchError, "update", "checked_states"
    ),
    "reduce_": Case(
        lambda g: sync(g).reduce_({"w": torch.ones(1).expand(4)}),
        fddp.TreeMismatchError,
        "reduce_",
        "check_writable",
    ),
    "reduce_scatter": Case(
        lambda g: sync(g).reduce_scatter(ONE), ValueError, "reduce_scatter", "check_fit"
    ),
    "all_gather": Case(lambda g: sync(g).all_gather(ONE), ValueError, "all_gather", "check_fit"),
    "shards": Case(
        lambda g: sync(g, **HALVES).all_gather(WRONG),
        fddp.TreeMismatchError,
        "all_gather",
        "matched_shards",
    ),
    "start": Case(
        lambda g: sync(g).start(WRONG).wait(), fddp.TreeMismatchError, "wait", "matched_leaves"
    ),
    "start of a function": Case(
        lambda g: sync(g).start(boom).wait(), LookupError, "wait", "begin", ("boom",)
    ),
    "start_all_gather": Case(
        lambda g: sync(g).start_all_gather(ONE), ValueError, "start_all_gather", "check_fit"
    ),
    "shard": Case(lambda g: sync(g).shard(ONE), ValueError, "shard", "check_fit"),
    "donate": Case(lambda g: sync(g).donate(ONE), fddp.TreeMismatchError, "donate", "donate"),
    "virtual_batches": Case(
        lambda g: sync(g).virtual_batches([ONE]), ValueError, "virtual_batches", "virtual_batches"
    ),
    "tune": Case(lambda g: sync(g).tune(boom), LookupError, "tune", "<lambda>", ("boom",)),
    "tune of nothing": Case(
        lambda g: sync(g).tune(lambda: None), ValueError, "tune", "raise_failure"
    ),
    "rebuild": Case(lambda g: sync(g).rebuild(3), TypeError, "rebuild", "resolve"),
    "join": Case(lambda g: fddp.GradSync.join(g), fddp.PlanMismatchError, "join", "_agreed"),
    # Loss functions
    "a loss": Case(
        lambda g: sync(g).value_and_grad(lambda p: p["w"])(ONE),
        fddp.LossError,
        "__call__",
        "_split",
    ),
    "an aux": Case(
        lambda g: sync(g).value_and_grad(loss, has_aux=True)(ONE),
        fddp.LossError,
        "__call__",
        "_split",
    ),
    "a loss that fails": Case(
        lambda g: sync(g).value_and_grad(boom)(ONE), LookupError, "__call__", "_compute", ("boom",)
    ),
    "a weight that fails": Case(
        lambda g: sync(g).value_and_grad(loss, weight_fn=boom)(ONE),
        LookupError,
        "__call__",
        "_compute",
        ("boom",),
    ),
    "parameters": Case(
        lambda g: sync(g).value_and_grad(loss)(WRONG),
        fddp.TreeMismatchError,
        "__call__",
        "matched_leaves",
    ),
    "parameters by name": Case(
        lambda g: sync(g).value_and_grad(loss)(params=ONE), TypeError, "__call__", "_params"
    ),
    "accumulated": Case(
        lambda g: sync(g).value_and_grad(loss)(ONE, accumulated=ONE),
        TypeError,
        "__call__",
        "_earlier",
    ),
    "an operator in a loss": Case(
        lambda g: sync(g).value_and_grad(lambda p: pmean_of_integers(p, g))(ONE),
        TypeError,
        "__call__",
        "_check",
        ("pmean_of_integers",),
    ),
    "a step in a loss": Case(
        nested, fddp.TreeMismatchError, "__call__", "matched_leaves", ("nested",)
    ),
    "a loop": Case(loop, LookupError, "uneven", "_grouped", ("boom",)),
    "a loop's step": Case(
        lambda g: next(fddp.uneven([], sync(g), every=0)), ValueError, "uneven", "_grouped"
    ),
    # Operators
    "pmean": Case(lambda g: fddp.pmean(torch.ones(2).int(), g), TypeError, "pmean", "_check"),
    "psum": Case(lambda g: fddp.psum(3.0, g), TypeError, "psum", "_check"),
    "an axis": Case(lambda g: fddp.psum(ONE, g, axis="host"), ValueError, "psum", "_check_axis"),
    "a plan": Case(
        lambda g: fddp.psum(ONE, g, plan=OTHER), fddp.PlanMismatchError, "psum", "_planned"
    ),
    "a group of an operator": Case(
        lambda g: fddp.psum(ONE, 3), TypeError, "psum", "communicator_of"
    ),
    "no default group": Case(lambda g: fddp.psum(ONE), fddp.FddpError, "psum", "resolve"),
    "pmax": Case(
        lambda g: fddp.pmax(torch.ones(2, dtype=torch.complex64), g), TypeError, "pmax", "_check"
    ),
    "all_gather of a scalar": Case(
        lambda g: fddp.all_gather(torch.ones(()), g, tiled=True), ValueError, "all_gather", "tiles"
    ),
    "reduce_scatter of three": Case(
        lambda g: fddp.reduce_scatter(torch.ones(3), g),
        ValueError,
        "reduce_scatter",
        "_unit",
        ranks=2,
    ),
    "all_to_all of three": Case(
        lambda g: fddp.all_to_all(torch.ones(3), g), ValueError, "all_to_all", "_unit", ranks=2
    ),
    "broadcast_from": Case(
        lambda g: fddp.broadcast_from(ONE, 7, g), ValueError, "broadcast_from", "_checked_root"
    ),
    "sync_on_backward": Case(
        lambda g: fddp.sync_on_backward(ONE, g, plan=OTHER),
        fddp.PlanMismatchError,
        "sync_on_backward",
        "_planned",
    ),
    "other operators": Case(
        lambda g: fddp.psum(ONE, g) if g.rank else fddp.pmean(ONE, g),
        fddp.DesyncError,
        "psum",
        "_resolve_mismatch",
        ranks=2,
    ),
    "a derivative": Case(in_backward, fddp.DesyncError, "backward", "_resolve_mismatch", ranks=2),
    "a map": Case(
        lambda g: fddp.tree_map(boom, ONE), LookupError, "tree_map", "<listcomp>", ("boom",)
    ),
    # Replicas
    "broadcast": Case(
        lambda g: fddp.broadcast(ONE, 7, group=g),
        fddp.PlanMismatchError,
        "broadcast",
        "_check_alike",
    ),
    "check_replicas": Case(
        lambda g: fddp.check_replicas({"w": torch.full((2,), float(g.rank))}, g),
        fddp.DesyncError,
        "check_replicas",
        "check_replicas",
        ranks=2,
    ),
    "reconcile": Case(
        lambda g: fddp.reconcile(ONE, g, step=-1), fddp.PlanMismatchError, "reconcile", "_agree"
    ),
    "a communicator": Case(
        lambda g: fddp.Communicator(g, bucket_cap_mb=-1.0),
        ValueError,
        "__init__",
        "check_no_failure",
    ),
    # DistributedDataParallel
    "no parameters": Case(
        lambda g: fddp.DistributedDataParallel(torch.nn.ReLU(), process_group=g),
        fddp.NoGradientError,
        "__init__",
        "_check_parameters",
    ),
    "a policy": Case(
        lambda g: wrapped(g, nonfinite="drop"), ValueError, "__init__", "check_policy"
    ),
    "a forward pass": Case(
        lambda g: fddp.DistributedDataParallel(Broken(), process_group=g)(torch.ones(2)),
        LookupError,
        "forward",
        "_run_ddp_forward",
        ("forward", "boom"),
    ),
    "finalize_backward": Case(
        lambda g: wrapped(g).finalize_backward(),
        RuntimeError,
        "finalize_backward",
        "finalize_backward",
    ),
    "ddp.join": Case(lambda g: wrapped(g, virtual_ranks=2).join(), ValueError, "join", "join"),
    "a second hook": Case(second_hook, RuntimeError, "register_comm_hook", "_set_hook"),
    "the end of backward": Case(
        failing_hook, LookupError, "on_end", "apply", ("boom_hook", "boom")
    ),
    "in_step of a peer": Case(in_step, fddp.PeerError, "on_end", "_give_up", ranks=2),
    # Values
    "plan_buckets": Case(
        lambda g: fddp.plan_buckets(ONE, order=[3]), ValueError, "plan_buckets", "_check_indices"
    ),
    "plan_optimal": Case(
        lambda g: fddp.plan_optimal(ONE, {"v": 1.0}, fddp.PRESETS["ethernet-10g"]),
        ValueError,
        "plan_optimal",
        "_by_path",
    ),
    "rebucket": Case(lambda g: fddp.rebucket(PLAN, [3]), ValueError, "rebucket", "_check_indices"),
    "from_json": Case(lambda g: fddp.BucketPlan.from_json("{}"), ValueError, "from_json", "decode"),
    "make_schedule": Case(
        lambda g: fddp.make_schedule(PLAN, 0), ValueError, "make_schedule", "__init__"
    ),
    "check_schedule": Case(
        lambda g: fddp.check_schedule(broken_schedule()),
        fddp.ScheduleError,
        "check_schedule",
        "fail_bucket",
    ),
    "simulate": Case(
        lambda g: fddp.simulate(SCHEDULE, "wifi", {"w": 1.0}),
        ValueError,
        "simulate",
        "preset_or_model",
    ),
    "functionalize": Case(
        lambda g: fddp.functionalize(torch.nn.Linear(2, 1)).apply({}, {}, torch.ones(2)),
        fddp.TreeMismatchError,
        "__call__",
        "_in_order",
    ),
    "loopback": Case(lambda g: fddp.loopback(0, boom), ValueError, "loopback", "loopback"),
    "next_loss_scale": Case(
        lambda g: fddp.numerics.next_loss_scale(fddp.numerics.LossScale(), False, growth=0.5),
        ValueError,
        "next_loss_scale",
        "next_loss_scale",
    ),
    "top_k": Case(lambda g: fddp.hooks.top_k(2.0), ValueError, "top_k", "__post_init__"),
    "block_top_k": Case(
        lambda g: fddp.hooks.block_top_k(2.0), ValueError, "block_top_k", "__post_init__"
    ),
    "auto": Case(lambda g: fddp.hooks.auto(every=0), ValueError, "auto", "auto"),
    "measure_cost": Case(
        lambda g: fddp.measure_cost(g, repeats=0), ValueError, "measure_cost", "measure_cost"
    ),
    "virtual_rng": Case(
        lambda g: fddp.virtual_rng(0, -1), ValueError, "virtual_rng", "virtual_rng"
    ),
    # Capabilities
    "local_sgd": Case(
        lambda g: fddp.periodic.local_sgd(ONE, 0), ValueError, "local_sgd", "_check_int"
    ),
    "a periodic schedule of another tree": Case(
        lambda g: fddp.periodic.PeriodicSync(
            WRONG, fddp.periodic.local_sgd({"v": torch.ones(3)}, 2), group=g
        ),
        fddp.TreeMismatchError,
        "__init__",
        "_check_fit",
    ),
    "a periodic step": Case(periodic_step, fddp.TreeMismatchError, "step", "matched_leaves"),
    "average": Case(
        lambda g: fddp.averaging.average(3.0, group=g), TypeError, "average", "_described"
    ),
    "Monitor": Case(lambda g: fddp.watch.Monitor(3), TypeError, "__init__", "communicator_of"),
    "assert_mean": Case(
        lambda g: fddp.testing.assert_mean(sync(g), [ONE, ONE]),
        ValueError,
        "assert_mean",
        "assert_mean",
    ),
    "check_gradients": Case(
        lambda g: fddp.testing.check_gradients(boom, torch.ones(2, dtype=torch.float64), g),
        LookupError,
        "check_gradients",
        "vector",
        ("boom",),
    ),
    "check_replication": Case(
        lambda g: fddp.testing.check_replication(boom, replicated=[ONE]),
        LookupError,
        "check_replication",
        "call_within",
        ("boom",),
    ),
}


def frames(error: BaseException) -> list[tuple[str, bool]]:
    """Names of functions in a traceback, outermost first, and if they are of fddp. Wrappers of
    entrances, which are in it before Python 3.11, are left out."""
    found = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    found = [frame for frame in found if frame.f_code.co_filename != CALL_CODE.co_filename]
    return [(f.f_code.co_name, f.f_globals["__name__"].startswith("fddp.")) for f in found]


def caught(case: Case) -> Exception:
    def act(group: Any) -> Exception | None:
        try:
            case.call(group)
        except Exception as error:
            return error
        return None

    error = fddp.loopback(case.ranks, act)[-1]
    assert error is not None
    return error


@pytest.mark.parametrize("name", CASES)
def test_few_frames(name: str) -> None:
    case = CASES[name]
    error = caught(case)
    assert type(error) is case.error
    shown = frames(error)
    own = [function for function, is_own in shown if is_own]
    assert len(own) <= 3
    assert (own[0], own[-1]) == (case.entrance, case.noticed) if case.entrance else own == []
    others = iter(function for function, is_own in shown if not is_own)
    assert all(function in others for function in ("act", *case.inside))


@pytest.mark.parametrize(
    "name", ["other caps", "a shape", "start", "a loss", "pmean", "the end of backward"]
)
def test_all_frames_on_request(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    short = frames(caught(CASES[name]))
    monkeypatch.setenv("FDDP_FULL_TRACEBACK", "1")
    assert len(frames(caught(CASES[name]))) > len(short)


def is_entrance(function: Any) -> bool:
    while function is not None:
        if function.__code__.co_filename == CALL_CODE.co_filename:
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def public_functions() -> dict[str, Any]:
    """Public functions by name, and methods whose docstring or class lists errors."""
    found = {}
    for module in MODULES:
        for name in module.__all__ if module is fddp else dir(module):
            value = getattr(module, name)
            is_strategy = getattr(value, "__module__", "") == "fddp.testing.strategies"
            if inspect.isfunction(value) and not (is_strategy or name.startswith("_")):
                found[f"{module.__name__}.{name}"] = value
    for owner in CLASSES:
        for name, value in inspect.getmembers(owner, inspect.isroutine):
            documented = owner if name in ("__init__", "__call__") else value
            is_own = str(getattr(value, "__module__", "")).startswith("fddp.")
            if is_own and "Raises" in (documented.__doc__ or "") and not name.startswith("_"):
                found[f"{owner.__name__}.{name}"] = value
    return found


@pytest.mark.parametrize("name", public_functions())
def test_public_functions_are_entrances(name: str) -> None:
    assert is_entrance(public_functions()[name])
