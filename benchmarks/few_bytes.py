"""Loss against bytes on the wire: DDP, local SGD, DiLoCo and Streaming DiLoCo.

    python -m benchmarks.few_bytes [--steps N] [--json PATH]

Two processes over gloo train a small model of characters on text that comes with Python: the topics
of `help()`, 465,000 characters of English (`pydoc_data.topics`). All methods take the same inner
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
from functools import lru_cache
from pydoc_data.topics import topics
from time import perf_counter, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

import fddp
from fddp import periodic
from fddp.cli.common import Printer, output, titled_table, whole
from fddp.cli.launch import launch
from fddp.cli.main import Parser, run
from fddp.core.text import size_text
from fddp.hooks import Hook, error_feedback, int4, int8
from tests.support.wire import connections, traffic_since

STEPS = 500
TARGET = 50.0
"""Bytes of DDP divided by those of a method that reaches the target."""

LEARNING_RATE = 0.016  # of 0.008, 0.012, 0.016 and 0.024
_WARM_UP_STEPS = 50
_CONTEXT, _EMBEDDING, _HIDDEN = 16, 16, 128
_BATCH = 128  # of each rank
_HELD_OUT = 0.1  # share of the text, at its end
_EVALUATED = 8192  # windows of the text that is held out
_CURVE = 50  # steps between points
_SETTLING_S = 0.3

Params = dict[str, Any]


@dataclass(frozen=True)
class Method:
    """A way to keep replicas together.

    Attributes:
        name: for tables.
        schedule: makes the schedule; None for DDP.
        outer: outer optimizer; None to average parameters.
        hook: wire format.
    """

    name: str
    schedule: Callable[[Any], periodic.PeriodicSchedule] | None
    outer: Any = None
    hook: Hook[Any] | None = None


def _every(period: int) -> Callable[[Any], periodic.PeriodicSchedule]:
    return lambda tree: periodic.diloco(tree, period)


def _streaming(tree: Any) -> periodic.PeriodicSchedule:
    return periodic.streaming_diloco(tree, 10, fragments=4, delay=1, mixing=0.5)


_OUTER = periodic.sgd(0.7, momentum=0.5)

METHODS = (
    Method("DDP", None),
    Method("local SGD, H=50", _every(50)),
    Method("DiLoCo, H=50", _every(50), _OUTER),
    Method("DiLoCo, H=16, 8 bits", _every(16), _OUTER, error_feedback(int8())),
    Method("DiLoCo, H=10, 4 bits", _every(10), _OUTER, error_feedback(int4(128))),
    Method("streaming, H=10, 4 bits", _streaming, _OUTER, error_feedback(int4(128))),
)


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


@lru_cache
def _text() -> tuple[Tensor, Tensor, int]:
    """Return windows of the text to train on and of that held out, and the number of characters."""
    text = "".join(text for _, text in sorted(topics.items()))
    numbers = {character: number for number, character in enumerate(sorted(set(text)))}
    data = torch.tensor([numbers[character] for character in text])
    cut = int(len(data) * (1 - _HELD_OUT))
    train, held_out = (part.unfold(0, _CONTEXT + 1, 1) for part in (data[:cut], data[cut:]))
    drawn = torch.randint(len(held_out), (_EVALUATED,), generator=_generator(1))
    return train, held_out[drawn], len(numbers)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def initial() -> Params:
    """Return the parameters at the start: a perceptron over the last 16 characters."""
    _, _, characters = _text()
    generator = _generator(0)

    def layer(inputs: int, outputs: int) -> dict[str, Tensor]:
        weight = torch.randn(inputs, outputs, generator=generator) / inputs**0.5
        return {"weight": weight, "bias": torch.zeros(outputs)}

    return {
        "embedding": torch.randn(characters, _EMBEDDING, generator=generator) / 2,
        "layers": [layer(_CONTEXT * _EMBEDDING, _HIDDEN), layer(_HIDDEN, _HIDDEN)],
        "head": layer(_HIDDEN, characters),
    }


def loss_fn(params: Params, windows: Tensor) -> Tensor:
    """Return the cross entropy of the last characters of windows, given the others."""
    x = params["embedding"][windows[:, :-1]].flatten(1)
    first, second = params["layers"]
    x = torch.tanh(x @ first["weight"] + first["bias"])
    x = x + torch.tanh(x @ second["weight"] + second["bias"])
    head = params["head"]
    return cross_entropy(x @ head["weight"] + head["bias"], windows[:, -1])


def _batch(rank: int, step: int) -> Tensor:
    train, *_ = _text()
    half = len(train) // 2
    drawn = torch.randint(half, (_BATCH,), generator=_generator(1_000_000 * rank + step))
    return train[rank * half + drawn]


def _gradients(params: Params, windows: Tensor) -> Params:
    leaves = fddp.tree_map(lambda p: p.detach().requires_grad_(), params)
    loss_fn(leaves, windows).backward()
    return fddp.tree_map(lambda p: p.grad, leaves)


def _adam(params: Params, grads: Params, moments: Any, step: int, steps: int) -> tuple[Params, Any]:
    first = fddp.tree_map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], grads)
    second = fddp.tree_map(lambda v, g: 0.99 * v + 0.01 * g * g, moments[1], grads)
    lr = LEARNING_RATE * min(1.0, (step + 1) / _WARM_UP_STEPS) * (1 - 0.9 * step / steps)
    one, two = 1 - 0.9 ** (step + 1), 1 - 0.99 ** (step + 1)
    stepped = fddp.tree_map(
        lambda p, m, v: p - lr * (m / one) / ((v / two).sqrt() + 1e-8), params, first, second
    )
    return stepped, (first, second)


def _trained(method: Method, steps: int, kept: ExitStack) -> Run:
    rank, params = dist.get_rank(), initial()
    zeros = fddp.tree_map(torch.zeros_like, params)
    moments, curve = (zeros, zeros), []
    _, held_out, _ = _text()
    sync: Any
    if method.schedule is None:
        sync = fddp.GradSync(params, transport="c10d")
    else:
        sync = periodic.PeriodicSync(
            params, method.schedule, outer=method.outer, hook=method.hook, transport="c10d"
        )
    kept.enter_context(sync)  # connections that are open count
    state = None if method.schedule is None else sync.init(params)
    gc.collect()
    sleep(_SETTLING_S)  # connections that are being closed no longer count
    before, start_s = connections(), perf_counter()
    for step in range(steps):
        grads = _gradients(params, _batch(rank, step))
        if method.schedule is None:
            params, moments = _adam(params, sync(grads), moments, step, steps)
        else:
            params, moments = _adam(params, grads, moments, step, steps)
            params, state = sync.step(params, state)
        if (step + 1) % _CURVE == 0 or step + 1 == steps:
            with torch.no_grad():
                loss = loss_fn(params, held_out).item()
            curve.append((step + 1, traffic_since(before).sent, loss))
    seconds = perf_counter() - start_s
    return Run(method.name, curve[-1][1], curve[-1][2], curve, seconds)


def run_rank(steps: int) -> list[Run]:
    """Train with all methods on this rank."""
    with ExitStack() as kept:
        return [_trained(method, steps, kept) for method in METHODS]


def measured(steps: int = STEPS) -> list[Run]:
    """Train with all methods on two processes; the results of rank 0."""
    return launch(2, run_rank, steps)[0]


def table(runs: Sequence[Run]) -> str:
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
    return titled_table(f"{steps} steps", caption, header, rows, left=("method",))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code."""
    parser = Parser(prog="python -m benchmarks.few_bytes", description="Loss against bytes.")
    parser.add_argument("--steps", type=whole(1), default=STEPS, metavar="N")
    parser.add_argument("--json", type=output, metavar="PATH", help="write the results there too")
    parser.set_defaults(run=_run, parser=parser)
    return run(parser, argv)


def _run(args: argparse.Namespace) -> int:
    runs = measured(args.steps)
    printer = Printer(args.json)
    printer.show(table(runs))
    printer.write_text(args.json, json.dumps([asdict(one) for one in runs], indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
