"""Compiled losses and steps beside eager ones: the same gradients, and what of the communication
backward hides.

In three forms a `GradSync` calls the loss function: as it is, compiled as one graph, and with each
layer compiled by itself. Backward of a compiled function gives all its gradients at its end, so
that buckets leave between graphs, not within one. In the last two forms the whole step is one
graph, with operators that start each bucket where its gradients are computed: the step of a
`GradSync`, and `fddp.pmean`.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

import fddp
from examples.common import Check, Report, difference, difference_between_ranks, main
from fddp.core.text import counted
from fddp.core.timeline import COMPUTE

Params: TypeAlias = list[dict[str, Tensor]]
Step: TypeAlias = Callable[[], tuple[Params, fddp.SyncInfo | None]]

#: What another order of float32 sums may do to gradients, which are about 1e-3.
_ROUNDING = 1e-7
_WARM = 3  # steps in which graphs are compiled and plans are rebuilt
_COLUMNS = 26  # of a timeline as text


class Size(NamedTuple):
    """Size of the model and number of timed steps per form.

    Attributes:
        layers: number of layers.
        width: inputs and outputs of each.
        batch: rows of a batch.
        rounds: timed steps of each form, in turn.
    """

    layers: int = 8
    width: int = 768
    batch: int = 512
    rounds: int = 9


_SIZE = Size()


def example(backend: str = "inductor", size: Size = _SIZE) -> Report:
    """Takes a step in five forms, compares gradients, and shows when buckets leave."""
    torch.set_num_threads(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    params = fddp.broadcast(init_params(size, seed=rank))
    x, y = torch.randn(2, size.batch, size.width).unbind()
    with ExitStack() as opened:
        forms = make_forms(params, x, y, backend, opened)
        results, times_s = take_turns(forms, size.rounds)
    rows = [row for name in forms for row in _rows(name, *results[name], times_s[name])]
    eager, _ = results["eager"]
    checks = {
        f"{name} - eager": Check(difference(grads, eager), _ROUNDING)
        for name, (grads, _) in results.items()
        if name != "eager"
    }
    checks["between ranks"] = Check(
        max(difference_between_ranks(grads) for grads, _ in results.values()), 0.0
    )
    layers = f"{counted(size.layers, 'layer')} of {size.width} x {size.width}"
    title = f"{layers}, {counted(ranks, 'rank')}, {backend}"
    return Report(title, rows, checks)


def init_params(size: Size, seed: int) -> Params:
    """A weight of shape (width, width) and a bias of shape (width,) for each layer."""
    torch.manual_seed(seed)
    scale = size.width**-0.5
    return [
        {"w": scale * torch.randn(size.width, size.width), "b": torch.zeros(size.width)}
        for _ in range(size.layers)
    ]


def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """One layer; compiled by itself, it is one graph for all layers."""
    return torch.tanh(x @ w + b)


def loss_fn(params: Params, x: Tensor, y: Tensor, layer: Callable[..., Tensor] = layer) -> Tensor:
    """The mean squared error of the last layer's outputs."""
    for own in params:
        x = layer(x, own["w"], own["b"])
    return torch.nn.functional.mse_loss(x, y)


def make_forms(
    params: Params, x: Tensor, y: Tensor, backend: str, opened: ExitStack
) -> dict[str, Step]:
    """The five forms by name; a collective call. What they hold open is closed with `opened`."""
    cap_mb = params[0]["w"].nbytes / 2**20  # about a bucket for each layer
    everyone = opened.enter_context(fddp.Communicator(bucket_cap_mb=cap_mb))

    def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(fn, backend=backend, fullgraph=True)

    def synced(loss: Callable[..., Tensor], *, is_compiled: bool = False) -> Step:
        sync = fddp.GradSync(params, bucket_cap_mb=cap_mb, first_bucket_mb=cap_mb)
        own = opened.enter_context(sync).value_and_grad(loss, with_info=True)
        step = compiled(own) if is_compiled else own

        def take() -> tuple[Params, fddp.SyncInfo | None]:
            _, grads, info = step(params, x, y)
            return grads, sync.graph_info if is_compiled else info

        return take

    def by_operator(params: Params, x: Tensor, y: Tensor) -> Params:
        return fddp.pmean(torch.func.grad(loss_fn)(params, x, y), everyone)

    one_layer, with_pmean = compiled(layer), compiled(by_operator)
    return {
        "eager": synced(loss_fn),
        "one graph": synced(compiled(loss_fn)),
        "layer by layer": synced(lambda p, x, y: loss_fn(p, x, y, one_layer)),
        "the whole step": synced(loss_fn, is_compiled=True),
        "with pmean": lambda: (with_pmean(params, x, y), None),
    }


def take_turns(
    forms: dict[str, Step], rounds: int
) -> tuple[dict[str, tuple[Params, fddp.SyncInfo | None]], dict[str, float]]:
    """Result and median step time in seconds of each form."""
    for step in forms.values():
        for _ in range(_WARM):
            step()
    steps: dict[str, list[tuple[float, Any]]] = {name: [] for name in forms}
    for _ in range(rounds):
        for name, step in forms.items():
            start_s = time.perf_counter()
            result = step()
            steps[name].append((time.perf_counter() - start_s, result))
    results, times_s = {}, {}
    for name, taken in steps.items():
        times_s[name] = statistics.median_low(step_s for step_s, _ in taken)
        results[name] = next(result for step_s, result in taken if step_s == times_s[name])
    return results, times_s


def _rows(
    name: str, _: Params, info: fddp.SyncInfo | None, step_s: float
) -> list[tuple[str, str, str]]:
    shown = [(name, f"{1e3 * step_s:.1f} ms", "median step")]
    if info is None or info.timeline is None:
        return shown
    timeline = info.timeline.to_timeline()
    for lane in timeline.lanes:
        spans = [s for s in timeline.spans if s.lane == lane and s.end_s > s.start_s]
        line = [" "] * _COLUMNS
        for span in spans:
            first = int(_COLUMNS * span.start_s / timeline.step_s)
            last = int(_COLUMNS * span.end_s / timeline.step_s)
            for column in range(first, min(max(last, first + 1), _COLUMNS)):
                line[column] = "-" if lane == COMPUTE else str(span.bucket % 10)
        is_own = lane == COMPUTE
        remark = "" if is_own else f"{timeline.hidden_fraction:.0%} hidden"
        shown.append((f"  {'backward' if is_own else 'buckets'}", "".join(line), remark))
    return shown


if __name__ == "__main__":
    sys.exit(main("compiled"))
