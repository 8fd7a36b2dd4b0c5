"""Step times of sharded updates over a link of 1 Gbit/s beside the simulator's.

    sudo python -m benchmarks.next_forward

Two processes in network namespaces of their own, joined by a veth pair whose ends `tc` limits (see
`slow_link`). Each layer sleeps in place of its forward and, twice as long, of its backward compute,
so that the cores of this machine play no part. Parameters are all-gathered at the end of the step,
or during the next forward pass.

Printed are medians. Compute is measured without communication, and communication without compute.
The ratio is that of a step to the larger of the two; its bound holds where compute is the larger
and the all-gathers take no longer than a forward pass. The simulator knows the compute, and the
nominal rate of the link. Exits with 1 if a ratio is above its bound.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import fddp
from benchmarks.slow_link import run_ranks
from fddp import sharded
from fddp.core.tables import plain_table

LINK = fddp.CostModel(5e-4, 8e-9 * 1514 / 1448)
"""Of each frame of 1514 bytes, 1448 are payload. The latency is that of two processes and gloo."""

BOUND = 1.1

_LAYERS = 16
_FLOATS = 500_000  # of each layer
_LAYER_MS = (24.0, 16.0, 8.0)  # of forward
_STEPS, _WARMUP = 15, 3


class _Nap(torch.autograd.Function):
    """Identity that sleeps, and twice as long in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grad, None


def loss_fn(params: dict[str, Tensor], x: Tensor, layer_s: float) -> Tensor:
    """Use one layer after the other."""
    for leaf in params.values():
        x = _Nap.apply(x + leaf.sum(), layer_s)
    return x


class Costs(NamedTuple):
    """Seconds of the parts of a step, each without the others."""

    compute_s: float
    gather_s: float
    communication_s: float


def costs(params: Any, layer_s: float) -> Costs:
    """Measure a step without communication, and collectives without compute."""
    x = torch.zeros(())
    own = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
    half = {name: leaf[: _FLOATS // 2].clone() for name, leaf in params.items()}

    def compute() -> None:
        loss_fn(own, x, layer_s).backward()
        for name, leaf in own.items():
            assert leaf.grad is not None
            half[name] -= 0.1 * leaf.grad[: _FLOATS // 2]
            leaf.grad = None

    with new_sync(params) as sync:
        shards = sync.shard(params)
        gather_s = median_s(lambda: sync.start_all_gather(shards).wait())
        reduce_s = median_s(lambda: sync.reduce_scatter(params))
    return Costs(median_s(compute), gather_s, reduce_s + gather_s)


def median_s(call: Callable[[], object]) -> float:
    """Median duration of a call, over `_STEPS` after `_WARMUP`."""
    times_s = []
    for _ in range(_WARMUP + _STEPS):
        start_s = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - start_s)
    return statistics.median(times_s[_WARMUP:])


def new_sync(params: Any) -> fddp.GradSync:
    """A `GradSync` with one bucket for each layer."""
    plan = fddp.plan_buckets(params, bucket_cap_mb=1.0, first_bucket_mb=1.0)
    return fddp.GradSync(plan, algorithm="reduce_scatter", transport="c10d")


def step_s(params: Any, gather: str, layer_s: float) -> float:
    """Median seconds of a step, from one update to the next."""
    x = torch.zeros(())
    with new_sync(params) as sync:
        step = sync.value_and_grad(loss_fn)
        own, current = sync.shard(params), params

        def train() -> None:
            nonlocal own, current
            _, grads = step(current, x, layer_s)
            own = fddp.tree_map(lambda p, g: p - 0.1 * g, own, grads)
            if gather == "next_forward":
                current = sync.start_all_gather(own)
            else:
                current = sync.all_gather(own)

        return median_s(train)


def simulated(params: Any, gather: Any, compute_s: float) -> sharded.ShardedTimeline:
    """The simulator's steps, for layers with a third of their compute in forward."""
    plan = fddp.plan_buckets(params, bucket_cap_mb=1.0, first_bucket_mb=1.0)
    reduce = fddp.make_schedule(plan, 2, algorithm="reduce_scatter")
    layer_s = compute_s / (3 * _LAYERS)
    times = sharded.ComputeTimes(
        forward_s=_LAYERS * layer_s,
        use_times_s={name: layer_s * i for i, name in enumerate(params)},
        ready_times_s={name: 2 * layer_s * (_LAYERS - i) for i, name in enumerate(params)},
    )
    return sharded.simulate_sharded(sharded.make_sharded_schedule(reduce, gather), LINK, times)


def run_rank() -> int:
    """Measure on this rank; rank 0 prints the table. The exit code."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    params = {f"layer{i:02d}": torch.zeros(_FLOATS) for i in range(_LAYERS)}
    rows, misses = [], 0
    for layer_ms in _LAYER_MS:
        layer_s = layer_ms * 1e-3
        alone = costs(params, layer_s)
        for gather in ("step_end", "next_forward"):
            expected = simulated(params, gather, alone.compute_s)
            dist.barrier()
            measured_s = step_s(params, gather, layer_s)
            ratio = measured_s / max(alone.compute_s, alone.communication_s)
            fits = alone.gather_s <= alone.compute_s / 3
            is_bound = gather == "next_forward" and fits
            misses += is_bound and ratio > BOUND
            rows.append(
                (
                    f"{alone.compute_s * 1e3:.0f}",
                    f"{alone.communication_s * 1e3:.0f}",
                    f"{expected.communication_s * 1e3:.0f}",
                    gather,
                    f"{measured_s * 1e3:.0f}",
                    f"{expected.step_s * 1e3:.0f}",
                    f"{ratio:.3f}",
                    f"{expected.ratio:.3f}",
                    f"{BOUND}" if is_bound else "-",
                )
            )
    if dist.get_rank() == 0:
        header = (
            "compute ms",
            "communication ms",
            "simulated",
            "gathers",
            "step ms",
            "simulated",
            "ratio",
            "simulated",
            "bound",
        )
        print(plain_table(header, rows, numeric=(0, 1, 2, 4, 5, 6, 7, 8)))
    dist.destroy_process_group()
    return int(misses > 0)


if __name__ == "__main__":
    if sys.argv[1:] == ["rank"]:
        sys.exit(run_rank())
    sys.exit(run_ranks("benchmarks.next_forward", "1gbit", "256kb"))
