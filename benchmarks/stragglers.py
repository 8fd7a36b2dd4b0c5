"""Delays of one rank, and who names them: `python -m benchmarks.stragglers`.

Three ranks train a small network. In each phase of one of them in turn, a delay of 50, 20 or 5 ms
a step is injected. The others wait for it within their steps, so that a tool that times whole steps
sees all ranks slow alike. `fddp.watch` compares the ranks' own times by phase.

| Phase | Delay |
| --- | --- |
| input, optimizer | before the step, and after it |
| forward, backward | within the model |
| hook | within the communication hook, before it starts its all-reduce |
| gc | a full collection of Python's garbage collector in forward, with as many objects alive |
| communication | the TCP connections of the rank are slowed down in both directions, over gloo |

Steps go through the wrapper, through `value_and_grad` and, for arrays of JAX, through `sync(grads)`
with phases that the loop names itself: over shared memory, except for communication. The tool that
times whole steps applies the same test to their durations.
"""

from __future__ import annotations

import gc
import itertools
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor
from torch.func import functional_call

import fddp
from benchmarks.bounds import Figure, at_least
from benchmarks.measure import spread, timed
from benchmarks.scripts import numbers_table, options, publish
from fddp.cli.launch import launch
from fddp.cli.progress import Stages
from fddp.hooks import AllReduce, Bucket, BucketSpec, Future, Hook
from fddp.transport import TransportName
from fddp.watch import MonitorReport
from fddp.watch.links import sockets

DELAYS_MS = (50, 20, 5)
PHASES = ("input", "forward", "backward", "hook", "optimizer", "communication", "gc")
NONE = "no delay"
_RANKS = 3
_WIDTH, _BATCH = 160, 32
_CAP_MB = 0.15  # some buckets
_SENT_BYTES = 4 * 4 * _WIDTH**2 * 2 * (_RANKS - 1) / _RANKS  # by each rank in a ring, in a step
_WARM_UP = 12  # steps, in which plans are rebuilt
_SETTLING = 3  # steps of a case that do not count
_BOUND = 19
_MAX_PACING_RATE = 47  # SO_MAX_PACING_RATE
_UNLIMITED = -1


class Case(NamedTuple):
    """A delay of one rank; of none, if the phase is `NONE`."""

    phase: str
    delay_ms: int
    rank: int


@dataclass(frozen=True)
class Outcome:
    """Findings in one case.

    Attributes:
        case: the delay.
        is_right: True if `fddp.watch` names rank and phase, or none if there is no delay.
        is_right_by_steps: True if durations of whole steps name the rank, or none.
        finding: of `fddp.watch`.
        step_s: median of a step.
    """

    case: Case
    is_right: bool
    is_right_by_steps: bool
    finding: str
    step_s: float


class Delays:
    """The delay of this rank, in one phase.

    Attributes:
        phase: the delayed phase; "" for none.
        delay_s: seconds in each step.
    """

    phase = ""
    delay_s = 0.0

    def pause(self, phase: str) -> None:
        """Sleep, or collect garbage, if this is the delayed phase."""
        if phase == self.phase:
            gc.collect() if phase == "gc" else time.sleep(self.delay_s)


DELAYS = Delays()


class Pausing(torch.autograd.Function):
    """Identity, whose backward is delayed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        DELAYS.pause("backward")
        return grad


class Network(torch.nn.Module):
    """Layers whose backward pauses in the middle, when some gradients are on their way."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        DELAYS.pause("forward")
        DELAYS.pause("gc")
        for number, layer in enumerate(self.layers):
            x = torch.relu(layer(x))
            if number == 1:
                x = Pausing.apply(x)
        return x.square().mean()


@dataclass(frozen=True)
class PausingSum(Hook[tuple[()]]):
    """The plain sum, delayed on the first bucket of a step."""

    def init(self, spec: BucketSpec) -> tuple[()]:
        """Return no state."""
        return ()

    def apply(
        self, state: tuple[()], bucket: Bucket, all_reduce: AllReduce
    ) -> Future[tuple[Tensor, tuple[()]]]:
        """Start the sum."""
        if bucket.spec.index == 0:
            DELAYS.pause("hook")
        return all_reduce(bucket.buffer.clone()).map(lambda total: (total, state))


#: phases, with the transport and the hook of their steps
_SETTINGS: tuple[tuple[tuple[str, ...], TransportName, PausingSum | None], ...] = (
    (("input", "forward", "backward", "optimizer", "gc"), "shm", None),
    (("hook",), "shm", PausingSum()),
    (("communication",), "c10d", None),
)

#: trains one step on a batch of shape `(batch, width)`
Step = Callable[[fddp.watch.Monitor, Tensor], None]


def wrapper_loop(transport: TransportName, hook: PausingSum | None, stack: ExitStack) -> Step:
    """A loop of `fddp.DistributedDataParallel`."""
    torch.manual_seed(0)
    module = Network()
    model = fddp.DistributedDataParallel(module, bucket_cap_mb=_CAP_MB, transport=transport)
    if hook is not None:
        model.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    model.keep_sync_info()

    def step(monitor: fddp.watch.Monitor, x: Tensor) -> None:
        DELAYS.pause("input")
        optimizer.zero_grad()
        model(x).backward()
        assert model.sync_info is not None
        monitor.observe(model.sync_info)
        with monitor.phase("optimizer"):
            DELAYS.pause("optimizer")
            optimizer.step()

    return step


def function_loop(transport: TransportName, hook: PausingSum | None, stack: ExitStack) -> Step:
    """A loop of `value_and_grad`."""
    torch.manual_seed(0)
    module = Network()
    params = {name: leaf.detach() for name, leaf in module.named_parameters()}
    sync = stack.enter_context(_grad_sync(params, transport, hook))
    value_and_grad = sync.value_and_grad(
        lambda params, x: functional_call(module, params, (x,)), with_info=True
    )

    def step(monitor: fddp.watch.Monitor, x: Tensor) -> None:
        nonlocal params
        DELAYS.pause("input")
        _, grads, info = value_and_grad(params, x)
        monitor.observe(info)
        with monitor.phase("optimizer"):
            DELAYS.pause("optimizer")
            params = fddp.tree_map(lambda p, g: p - 1e-3 * g, params, grads)

    return step


def jax_loop(transport: TransportName, hook: PausingSum | None, stack: ExitStack) -> Step:
    """A loop of JAX, which names its phases."""
    import jax
    import jax.numpy as jnp

    keys = jax.random.split(jax.random.key(0), 4)
    params = [jax.random.normal(key, (_WIDTH, _WIDTH)) / _WIDTH**0.5 for key in keys]

    def loss_of(params: list[jax.Array], x: jax.Array) -> jax.Array:
        for weight in params:
            x = jax.nn.relu(x @ weight)
        return jnp.mean(x**2)

    def differentiated(params: list[jax.Array], x: jax.Array) -> Any:
        return jax.vjp(lambda params: loss_of(params, x), params)

    forward = jax.jit(differentiated)
    backward = jax.jit(lambda pull: pull(jnp.ones(()))[0])
    update = jax.jit(partial(jax.tree.map, lambda p, g: p - 1e-3 * g))
    sync = stack.enter_context(_grad_sync(params, transport, hook))

    def step(monitor: fddp.watch.Monitor, x: Tensor) -> None:
        nonlocal params
        with monitor.phase("input"):
            DELAYS.pause("input")
            batch = jnp.asarray(x.numpy())
        with monitor.phase("forward"):
            DELAYS.pause("forward")
            DELAYS.pause("gc")
            _, pull = jax.block_until_ready(forward(params, batch))
        with monitor.phase("backward"):
            DELAYS.pause("backward")
            grads = jax.block_until_ready(backward(pull))
        grads, info = sync(grads, with_info=True)
        monitor.observe(info)
        with monitor.phase("optimizer"):
            DELAYS.pause("optimizer")
            params = jax.block_until_ready(update(params, grads))

    return step


LOOPS: dict[str, Callable[[TransportName, PausingSum | None, ExitStack], Step]] = {
    "wrapper": wrapper_loop,
    "value_and_grad": function_loop,
    "JAX": jax_loop,
}


def _grad_sync(params: Any, transport: TransportName, hook: PausingSum | None) -> fddp.GradSync:
    return fddp.GradSync(
        params, bucket_cap_mb=_CAP_MB, first_bucket_mb=_CAP_MB, transport=transport, hook=hook
    )


def main() -> None:
    """Measures and prints; two to three minutes."""
    parser = options(__doc__)
    parser.add_argument("--steps", type=int, default=40, metavar="N", help="steps of each case")
    parser.add_argument("--loops", nargs="+", choices=[*LOOPS], default=[*LOOPS], metavar="LOOP")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES, metavar="PHASE")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    results = launch(_RANKS, run_rank, args.loops, args.phases, args.steps)[0]
    publish([_table(results, load)], figures(results), _values(results, load), args.json)
    for name, outcomes in results.items():
        for one in outcomes:
            if not one.is_right:
                phase, delay_ms, rank = one.case
                print(f"{name}: {delay_ms} ms in {phase} of rank {rank}: {one.finding}")


def run_rank(
    loops: Sequence[str],
    phases: Sequence[str] = PHASES,
    steps: int = 40,
    delays_ms: Sequence[int] = DELAYS_MS,
) -> dict[str, list[Outcome]]:
    """Outcomes of all cases, by loop."""
    results: dict[str, list[Outcome]] = {}
    with Stages(shown=dist.get_rank() == 0) as stages:
        for name in loops:
            stages.begin(name, len(phases) * len(delays_ms) + len(_SETTINGS))
            found = results[name] = []
            for of_setting, transport, hook in _SETTINGS:
                delayed = [phase for phase in of_setting if phase in phases]
                if not delayed:
                    continue
                with ExitStack() as stack:
                    step = LOOPS[name](transport, hook, stack)
                    _train(step, _WARM_UP)
                    cases = [Case(NONE, 0, -1)]
                    for phase, delay_ms in itertools.product(delayed, delays_ms):
                        rank = (len(found) + len(cases)) % dist.get_world_size()
                        cases.append(Case(phase, delay_ms, rank))
                    for case in cases:
                        found.append(_outcome(case, step, steps))
                        stages.advance()
    return results


def _outcome(case: Case, step: Step, steps: int) -> Outcome:
    with _delayed(case):
        dist.barrier()
        _train(step, _SETTLING)
        report = _train(step, steps).report()
    # The same test, of durations that a tool without phases and waits knows.
    whole = [
        replace(one, own=one.step, phases={"step": one.step}, link_s=None) for one in report.ranks
    ]
    by_watch, by_steps = report.straggler, MonitorReport.of(whole).straggler
    named = None if by_watch is None else (by_watch.rank, by_watch.phase)
    named_by_steps = None if by_steps is None else by_steps.rank
    is_none = case.phase == NONE
    return Outcome(
        case,
        named == (None if is_none else (case.rank, case.phase)),
        named_by_steps == (None if is_none else case.rank),
        report.finding,
        statistics.median(one.step.median_s for one in report.ranks),
    )


def _train(step: Step, steps: int) -> fddp.watch.Monitor:
    monitor = fddp.watch.Monitor(window=steps)
    random = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        step(monitor, torch.randn(_BATCH, _WIDTH, generator=random))
    return monitor


@contextmanager
def _delayed(case: Case) -> Iterator[None]:
    """Delay one rank in a phase; a collective call."""
    is_slow = case.rank == dist.get_rank()
    delay_s = case.delay_ms * 1e-3
    with ExitStack() as stack:
        if case.phase == "communication":
            stack.enter_context(_slow_link(case.rank, _SENT_BYTES / delay_s))
        elif is_slow:
            DELAYS.phase, DELAYS.delay_s = case.phase, delay_s
            stack.callback(setattr, DELAYS, "phase", "")
        if is_slow and case.phase == "gc":
            stack.enter_context(_heap(delay_s))
        yield


@contextmanager
def _heap(collection_s: float) -> Iterator[None]:
    """Keep as many objects as it takes so long to collect garbage among."""
    gc.collect()
    gc.freeze()  # what is there already takes no part
    heap: list[list[object]] = [[] for _ in range(100_000)]
    for _ in range(3):  # larger heaps fit no cache, and take longer for each object
        ratio = collection_s / min(timed(gc.collect) for _ in range(3))
        count = int(len(heap) * ratio)
        heap = [*heap[:count], *([] for _ in range(count - len(heap)))]
    yield
    gc.unfreeze()


@contextmanager
def _slow_link(rank: int, bytes_per_s: float) -> Iterator[None]:
    """Limit the rate of each TCP connection of a rank, in both directions; a collective call."""
    own = [ends for ends, _ in sockets()] if rank == dist.get_rank() else []
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, own)
    of_rank = {tuple(ends) for ends in everyones[rank]}

    def limit(rate: int) -> None:
        for (one, other), end in sockets():
            if {(one, other), (other, one)} & of_rank:
                end.setsockopt(socket.SOL_SOCKET, _MAX_PACING_RATE, rate)

    limit(int(bytes_per_s))
    yield
    limit(_UNLIMITED)


def figures(results: Mapping[str, Sequence[Outcome]]) -> list[Figure]:
    """Figures with a bound."""
    found = []
    for name, outcomes in results.items():
        right = [one.is_right for one in outcomes if one.case.phase != NONE]
        if len(right) == len(PHASES) * len(DELAYS_MS):
            what = "rank and phase named, of 21"
            found.append(at_least(_BOUND, what, name, spread([float(sum(right))])))
    return found


def _table(results: Mapping[str, Sequence[Outcome]], load: float) -> Table:
    table = numbers_table(
        "Delays of one rank of three, in ms a step, of which rank and phase are named",
        (*results, "rank by step times"),
        caption=f"load average before: {load:.1f}",
    )
    everything = [one for of in results.values() for one in of]
    for phase in PHASES:
        delays = (
            " ".join(
                str(one.case.delay_ms) for one in of if one.case.phase == phase and one.is_right
            )
            for of in results.values()
        )
        by_steps = [one.is_right_by_steps for one in everything if one.case.phase == phase]
        table.add_row(phase, *delays, _count(by_steps))
    for label, is_delayed in (("all", True), ("none, without a delay", False)):
        rows = [
            [one for one in of if (one.case.phase != NONE) == is_delayed]
            for of in (*results.values(), everything)
        ]
        *of_loops, of_all = rows
        counts = (_count([one.is_right for one in of]) for of in of_loops)
        table.add_row(label, *counts, _count([one.is_right_by_steps for one in of_all]))
    return table


def _count(flags: Sequence[bool]) -> str:
    return f"{sum(flags)} of {len(flags)}"


def _values(results: Mapping[str, Sequence[Outcome]], load: float) -> dict[str, Any]:
    outcomes = {name: [asdict(one) for one in of] for name, of in results.items()}
    return {"load_before": load, "outcomes": outcomes}


if __name__ == "__main__":
    main()
