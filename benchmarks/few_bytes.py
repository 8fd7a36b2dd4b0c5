"""Loss against bytes on the wire: DDP, communication hooks, local SGD, DiLoCo and Streaming DiLoCo.

    python -m benchmarks.few_bytes [--steps N] [--draw N] [--case CASE] [--json PATH]

Two processes over gloo train two small models of characters, a perceptron and a transformer, on
text that comes with Python (`benchmarks/characters.py`). All methods take the same inner
steps of Adam from the same parameters, each rank on its own half of the text. The learning rate is
the best for DDP of those tried, and is not tuned for the others; the outer optimizers are chosen
from learning rates of 0.7 and 1 and momenta of 0.5, 0.7 and 0.9. Bytes are those that the kernel
counts on the TCP connections of rank 0.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from time import perf_counter, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fddp
from benchmarks.characters import PERCEPTRON, TRANSFORMER, Model, Params, generator, text
from fddp import periodic
from fddp.cli.common import Printer, output, titled_table, whole
from fddp.cli.launch import launch
from fddp.cli.main import Parser, run
from fddp.core.text import size_text
from fddp.hooks import (
    AllReduce,
    Bucket,
    BucketSpec,
    Future,
    Hook,
    auto,
    block_top_k,
    error_feedback,
    int4,
    int8,
)
from tests.support.wire import connections, traffic_since

STEPS = 500
TARGET = 50.0
"""Bytes of DDP divided by those of a method that reaches the target."""

_WARM_UP_STEPS = 50
_CURVE = 50  # steps between points
_SETTLING_S = 0.3


@dataclass(frozen=True)
class Method:
    """A way to keep replicas together.

    Attributes:
        name: for tables.
        schedule: makes the schedule; None for a mean in every step.
        outer: outer optimizer; None to average parameters.
        hook: wire format.
    """

    name: str
    schedule: Callable[[Any], periodic.PeriodicSchedule] | None = None
    outer: Any = None
    hook: Hook[Any] | None = None


def _every(period: int) -> Callable[[Any], periodic.PeriodicSchedule]:
    return lambda tree: periodic.diloco(tree, period)


def _streaming(tree: Any) -> periodic.PeriodicSchedule:
    return periodic.streaming_diloco(tree, 10, fragments=4, delay=1, mixing=0.5)


_OUTER = periodic.sgd(0.7, momentum=0.5)

METHODS = (
    Method("DDP"),
    Method("local SGD, H=50", _every(50)),
    Method("DiLoCo, H=50", _every(50), _OUTER),
    Method("DiLoCo, H=16, 8 bits", _every(16), _OUTER, error_feedback(int8())),
    Method("DiLoCo, H=10, 4 bits", _every(10), _OUTER, error_feedback(int4(128))),
    Method("streaming, H=10, 4 bits", _streaming, _OUTER, error_feedback(int4(128))),
)


@dataclass(frozen=True)
class Late(Hook[Tensor]):
    """The sum of the step before, zero in the first step: what a delay costs."""

    def init(self, spec: BucketSpec) -> Tensor:
        return torch.zeros(spec.numel, dtype=spec.dtype)

    def apply(
        self, state: Tensor, bucket: Bucket, all_reduce: AllReduce
    ) -> Future[tuple[Tensor, Tensor]]:
        return all_reduce(bucket.buffer.clone()).map(lambda total: (state, total))


HOOKS = (
    Method("DDP"),
    Method('hook="auto"', hook=auto()),
    Method("auto(tolerance=0.5)", hook=auto(tolerance=0.5)),
    Method("auto(tolerance=1.0)", hook=auto(tolerance=1.0)),
    Method("4 bits", hook=error_feedback(int4())),
    Method("block_top_k(0.05)", hook=block_top_k(0.05)),
    Method("DDP, a step late", hook=Late()),
)

CASES = {
    "periodic": (PERCEPTRON, METHODS),
    "hooks": (PERCEPTRON, HOOKS),
    "hooks of a transformer": (TRANSFORMER, HOOKS),
}


@dataclass(frozen=True)
class Run:
    """Result of one method.

    Attributes:
        name: the method.
        sent: bytes that rank 0 sent.
        loss: final loss on the text that is held out, in nats a character.
        curve: steps, bytes sent and loss, from time to time.
        seconds: duration of the training.
    """

    name: str
    sent: int
    loss: float
    curve: list[tuple[int, int, float]]
    seconds: float


def _batch(model: Model, rank: int, step: int, draw: int) -> Tensor:
    train, *_ = text()
    half = len(train) // 2
    seed = 1_000_000 * (rank + 7 * draw) + step
    drawn = torch.randint(half, (model.batch,), generator=generator(seed))
    return train[rank * half + drawn]


def _gradients(model: Model, params: Params, windows: Tensor) -> Params:
    leaves = fddp.tree_map(lambda p: p.detach().requires_grad_(), params)
    model.loss_fn(leaves, windows).backward()
    return fddp.tree_map(lambda p: p.grad, leaves)


def _adam(params: Params, grads: Params, moments: Any, step: int, lr: float) -> tuple[Params, Any]:
    first = fddp.tree_map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], grads)
    second = fddp.tree_map(lambda v, g: 0.99 * v + 0.01 * g * g, moments[1], grads)
    one, two = 1 - 0.9 ** (step + 1), 1 - 0.99 ** (step + 1)
    stepped = fddp.tree_map(
        lambda p, m, v: p - lr * (m / one) / ((v / two).sqrt() + 1e-8), params, first, second
    )
    return stepped, (first, second)


def _trained(model: Model, method: Method, steps: int, draw: int, kept: ExitStack) -> Run:
    rank, params = dist.get_rank(), model.initial()
    zeros = fddp.tree_map(torch.zeros_like, params)
    moments, curve = (zeros, zeros), []
    held_out = text()[1][: model.evaluated]
    sync: Any
    if method.schedule is None:
        sync = fddp.GradSync(params, hook=method.hook, transport="c10d")
    else:
        sync = periodic.PeriodicSync(
            params, method.schedule, outer=method.outer, hook=method.hook, transport="c10d"
        )
    kept.enter_context(sync)  # connections that are open count
    state = sync.init_state() if method.schedule is None else sync.init(params)
    gc.collect()
    sleep(_SETTLING_S)  # connections that are being closed no longer count
    before, start_s = connections(), perf_counter()
    for step in range(steps):
        grads = _gradients(model, params, _batch(model, rank, step, draw))
        if method.schedule is None:
            grads, state = sync.update(grads, state)
        warmth = min(1.0, (step + 1) / _WARM_UP_STEPS)
        lr = model.learning_rate * warmth * (1 - 0.9 * step / steps)
        params, moments = _adam(params, grads, moments, step, lr)
        if method.schedule is not None:
            params, state = sync.step(params, state)
        if (step + 1) % _CURVE == 0 or step + 1 == steps:
            with torch.no_grad():
                loss = model.loss_fn(params, held_out).item()
            curve.append((step + 1, traffic_since(before).sent, loss))
    seconds = perf_counter() - start_s
    return Run(method.name, curve[-1][1], curve[-1][2], curve, seconds)


def run_rank(case: str, steps: int, draw: int) -> list[Run]:
    """Train with all methods of a case on this rank."""
    model, methods = CASES[case]
    with ExitStack() as kept:
        runs = [_trained(model, method, steps, draw, kept) for method in methods]
        dist.barrier()  # a peer that closes its connections ends those counted here
    return runs


def measured(steps: int = STEPS, case: str = "periodic", draw: int = 0) -> list[Run]:
    """Train with all methods of a case on two processes; the results of rank 0."""
    return launch(2, run_rank, case, steps, draw)[0]


def initial() -> Params:
    """Return the parameters of the perceptron at the start."""
    return PERCEPTRON.initial()


def table(runs: Sequence[Run], model: Model = PERCEPTRON) -> str:
    """Return the results beside those of DDP, the first."""
    ddp = runs[0]
    rows = [
        (
            one.name,
            size_text(one.sent),
            f"1/{ddp.sent / one.sent:.1f}",
            f"{one.loss:.4f}",
            f"{one.loss / ddp.loss - 1:+.2%}",
        )
        for one in runs
    ]
    header = ("method", "sent", "of DDP's", "loss", "beside DDP's")
    steps = runs[0].curve[-1][0]
    caption = "2 processes over gloo; loss on text that is held out, nats a character"
    return titled_table(f"{model.name}, {steps} steps", caption, header, rows, left=("method",))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code."""
    parser = Parser(prog="python -m benchmarks.few_bytes", description="Loss against bytes.")
    parser.add_argument("--steps", type=whole(1), default=STEPS, metavar="N")
    parser.add_argument(
        "--draw", type=whole(0), default=0, metavar="N", help="number of the draw of batches"
    )
    parser.add_argument("--case", choices=CASES, action="append", help="only this one")
    parser.add_argument("--json", type=output, metavar="PATH", help="write the results there too")
    parser.set_defaults(run=_run, parser=parser)
    return run(parser, argv)


def _run(args: argparse.Namespace) -> int:
    printer, results = Printer(args.json), {}
    for case in args.case or CASES:
        runs = measured(args.steps, case, args.draw)
        printer.show(table(runs, CASES[case][0]))
        results[case] = [asdict(one) for one in runs]
    printer.write_text(args.json, json.dumps(results, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
