"""The same questions on a GPU: `python -m benchmarks.gpu`, which `make bench-gpu` runs.

One rank: pack and unpack against the device's own copy, and steps against those of torch's DDP.
`torchrun --nproc-per-node 2 -m benchmarks.gpu` has ranks share the device over gloo, since NCCL
refuses that, and measures steps. Where there is no GPU it says so, and measures nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from rich.table import Table
from torch import nn

from benchmarks.bounds import Figure, at_least, at_most
from benchmarks.competitors import (
    DETERMINISTIC,
    FDDP,
    LOCAL_FUNCTION,
    LOCAL_MODULE,
    OVER_GLOO,
    makers,
)
from benchmarks.measure import Series, measure, ratio
from benchmarks.models import WORKLOADS, Workload, stack
from benchmarks.packing import make_bucket
from benchmarks.scripts import numbers_table, options, publish
from fddp.cli.progress import Stages
from fddp.core.text import counted
from fddp.native.pack import pack_, unpack_

_LEAVES = 300
_NUMEL = (1 << 30) // 4 // _LEAVES  # 1 GiB of float32 in all
_STEPS = 10
_WARM_UP = 4
_COPY = "one copy"
_IN_A_ROW = 10  # so that the device, not the host, sets the pace

#: larger than those for a CPU, so that the device has something to do
MODELS = {
    "mlp": stack("MLP, 8 layers of 4096x4096", layers=8, width=4096, rows=512),
    "small": WORKLOADS["small"],
    "transformer": WORKLOADS["transformer"],
    "conv": WORKLOADS["conv"],
}


def main() -> None:
    """Measures and prints; about a minute."""
    args = options(__doc__, rounds=7).parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was measured")
        return
    card = torch.cuda.get_device_name()
    device = torch.device("cuda", torch.cuda.current_device())
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    else:
        open_group(device)
    is_first, ranks = dist.get_rank() == 0, dist.get_world_size()
    models = MODELS if ranks == 1 else WORKLOADS
    try:
        with Stages(shown=is_first) as stages:
            packing = packing_times(device, args.rounds, stages) if ranks == 1 else {}
            steps = {
                name: step_times(workload, device, args.rounds, stages)
                for name, workload in models.items()
            }
    finally:
        dist.destroy_process_group()
    if not is_first:
        return
    print(
        f"{counted(ranks, 'rank')} on {card}, torch {torch.__version__}, CUDA {torch.version.cuda}"
    )
    tables = [_packing_table(packing)] if packing else []
    tables += [_steps_table(models[name].title, series) for name, series in steps.items()]
    publish(tables, figures(packing, steps), {"card": card, "ranks": ranks}, args.json)


def open_group(device: torch.device) -> None:
    """A default group of this process alone, for tensors on the CPU and on `device`."""
    torch.cuda.set_device(device)
    store = dist.HashStore()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1, device_id=device
    )


def packing_times(
    device: torch.device, rounds: int, stages: Stages, leaves: int = _LEAVES, numel: int = _NUMEL
) -> dict[str, Series]:
    """Times of packing and unpacking float32 leaves, and of one copy of as many bytes; of
    `_IN_A_ROW` calls."""
    bucket = make_bucket(leaves, numel, torch.float32, device)
    flat = torch.randn(bucket.buffer.numel(), device=device)
    sources, layout, buffer, _ = bucket
    calls: dict[str, Callable[[], object]] = {
        _COPY: lambda: buffer.copy_(flat),
        "pack_": lambda: pack_(buffer, layout, sources),
        "pack_, scaled": lambda: pack_(buffer, layout, sources, 0.5),
        "unpack_": lambda: unpack_(sources, layout, buffer, stats=False),
        "unpack_, scaled": lambda: unpack_(sources, layout, buffer, 0.5, stats=False),
    }
    stages.begin(f"packing {buffer.nbytes >> 20} MiB in {leaves} leaves", rounds)
    in_a_row = {name: partial(_repeat, call) for name, call in calls.items()}
    return measure(_finished(in_a_row, device), rounds, 5, stages.advance)


def _repeat(call: Callable[[], object]) -> None:
    for _ in range(_IN_A_ROW):
        call()


def step_times(
    workload: Workload, device: torch.device, rounds: int, stages: Stages
) -> dict[str, Series]:
    """Steps: local only, fddp, and DDP in its modes. A collective call."""
    placed = _on(workload, device)
    batch = placed.batch(dist.get_rank())
    has_buffers = any(True for _ in placed.build().buffers())
    field = [
        make(placed, batch)
        for name, make in makers(has_buffers).items()
        if OVER_GLOO not in name and name != DETERMINISTIC
    ]
    for contestant in field:
        for _ in range(_WARM_UP):
            contestant.step()
    stages.begin(workload.title, rounds)
    steps = _finished({contestant.name: contestant.step for contestant in field}, device)
    series = measure(steps, rounds, _STEPS, stages.advance)
    for contestant in field:
        contestant.close()
    return series


def figures(
    packing: Mapping[str, Series], steps: Mapping[str, Mapping[str, Series]]
) -> list[Figure]:
    """Figures with a bound."""
    found = [
        at_least(0.8, f"bandwidth / device copy, {name}", "1 GiB", ratio(packing[_COPY], times))
        for name, times in packing.items()
        if name != _COPY
    ]
    for model, series in steps.items():
        theirs = min(
            (times for name, times in series.items() if name.startswith("DDP ")),
            key=lambda times: times.median_s,
        )
        found += [
            at_most(1.0, "step / best DDP", f"{model}, {name}", ratio(times, theirs))
            for name, times in series.items()
            if name.startswith(FDDP)
        ]
    return found


def _on(workload: Workload, device: torch.device) -> Workload:
    def build() -> nn.Module:
        return workload.build().to(device)

    return replace(workload, build=build, batch=lambda rank: workload.batch(rank).to(device))


def _finished(
    calls: Mapping[str, Callable[[], object]], device: torch.device
) -> dict[str, Callable[[], object]]:
    """Each call, and waiting until the device has done it."""
    if device.type != "cuda":
        return dict(calls)

    def finishing(call: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            call()
            torch.cuda.synchronize()

        return run

    return {name: finishing(call) for name, call in calls.items()}


def _packing_table(series: Mapping[str, Series]) -> Table:
    table = numbers_table("1 GiB of float32 in 300 leaves", ("ms", "GB/s read and written"))
    moved = 2 * 4 * _LEAVES * _NUMEL
    for name, times in series.items():
        seconds = times.median_s / _IN_A_ROW
        table.add_row(name, f"{seconds * 1e3:.2f}", f"{moved / seconds / 1e9:.0f}")
    return table


def _steps_table(title: str, series: Mapping[str, Series]) -> Table:
    table = numbers_table(title, ("ms", "less local step"))
    for name, times in series.items():
        is_function = name in (FDDP, LOCAL_FUNCTION)
        local = series[LOCAL_FUNCTION if is_function else LOCAL_MODULE]
        more_s = times.median_s - local.median_s
        table.add_row(name, f"{times.median_s * 1e3:.2f}", f"{more_s * 1e3:.2f}")
    return table


if __name__ == "__main__":
    main()
