"""Flatten and copy against what torch and libc do: `python -m benchmarks.packing`.

One process, one thread. Small leaves are held against `torch._foreach` copies and a scale, large
ones against `memcpy` of as many bytes.
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.bounds import Figure, at_least, at_most
from benchmarks.measure import Series, ratio, rounds_s, timed
from benchmarks.scripts import numbers_table, options, publish
from fddp.cli.progress import Stages
from fddp.native.layout import Layout
from fddp.native.pack import pack_, unpack_

Calls = Mapping[str, Callable[[], object]]

SMALL = "10,000 leaves of 32 float32, scaled"
CAST = "10,000 leaves of 32 bfloat16, scaled, cast to float32 and back"
LARGE = "64 MiB of float32 in 16 leaves, scaled"
ROUNDS = 9


class Bucket(NamedTuple):
    """Leaves, the buffer that they are packed into, and its slices."""

    leaves: list[Tensor]
    layout: Layout
    buffer: Tensor
    views: list[Tensor]


def make_bucket(
    count: int, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Bucket:
    """Leaves of `numel` elements of `dtype`, and a bucket of float32."""
    layout = Layout(
        offsets=tuple(range(0, count * numel, numel)),
        shapes=((numel,),) * count,
        strides=((1,),) * count,
        numel=count * numel,
    )
    buffer = torch.zeros(count * numel, device=device)
    leaves = [torch.randn(numel, device=device).to(dtype) for _ in range(count)]
    return Bucket(leaves, layout, buffer, list(torch.split(buffer, numel)))


def main() -> None:
    """Measures and prints; some seconds."""
    args = options(__doc__).parse_args()
    torch.set_num_threads(1)
    cases: dict[str, Callable[[], Calls]] = {
        SMALL: lambda: _small(torch.float32),
        CAST: lambda: _small(torch.bfloat16),
        LARGE: _large,
    }
    results = {}
    with Stages(shown=True) as stages:
        for title, make in cases.items():
            stages.begin(title, ROUNDS)
            results[title] = in_turn(make(), stages.advance)
    publish([_table(results)], figures(results), {"rounds_s": rounds_s(results)}, args.json)


def figures(results: Mapping[str, Mapping[str, Series]]) -> list[Figure]:
    """Figures with a bound."""
    small = [
        at_most(0.5, f"{way} / torch._foreach", case, ratio(series[way], series[f"{way}, foreach"]))
        for case, series in results.items()
        for way in ("pack_", "unpack_")
        if case in (SMALL, CAST)
    ]
    large = [
        at_least(0.8, f"bandwidth, {way} / memcpy", LARGE, ratio(copy, series[way]))
        for series, copy in [(results[LARGE], results[LARGE]["memcpy"])]
        for way in ("pack_", "unpack_")
    ]
    return small + large


def _small(dtype: torch.dtype) -> Calls:
    leaves, layout, buffer, views = make_bucket(10_000, 32, dtype)

    def pack_foreach() -> None:
        torch._foreach_copy_(views, leaves)
        torch._foreach_mul_(views, 0.5)

    def unpack_foreach() -> None:
        torch._foreach_copy_(leaves, views)
        torch._foreach_mul_(leaves, 0.5)

    return {
        "pack_, foreach": pack_foreach,
        "pack_": lambda: pack_(buffer, layout, leaves, 0.5),
        "unpack_, foreach": unpack_foreach,
        "unpack_": lambda: unpack_(leaves, layout, buffer, 0.5),
    }


def _large() -> Calls:
    leaves, layout, buffer, _ = make_bucket(16, 1 << 20, torch.float32)
    flat = torch.randn(buffer.numel())
    return {
        "memcpy": lambda: ctypes.memmove(buffer.data_ptr(), flat.data_ptr(), flat.nbytes),
        "copy_": lambda: buffer.copy_(flat),
        "pack_": lambda: pack_(buffer, layout, leaves, 0.5),
        "unpack_": lambda: unpack_(leaves, layout, buffer, 0.5),
    }


def in_turn(calls: Calls, after_round: Callable[[], None]) -> dict[str, Series]:
    """Times calls of one process in turn; a round is the median of three calls."""
    times_s: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            call()
            times_s[name].append(statistics.median(timed(call) for _ in range(3)))
        after_round()
    return {name: Series(tuple(rounds_s)) for name, rounds_s in times_s.items()}


def _table(results: Mapping[str, Mapping[str, Series]]) -> Table:
    table = numbers_table("Packing and unpacking, one thread", ["ms: median of rounds"])
    for title, series in results.items():
        table.add_section()
        table.add_row(title, "")
        for name, times in series.items():
            table.add_row(f"  {name}", f"{times.median_s * 1e3:.3g}")
    return table


if __name__ == "__main__":
    main()
