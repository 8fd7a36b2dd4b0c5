"""Reprs of the information on a step: short, whatever the number of leaves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import fddp


def info_of(leaves: int, unused: int = 0) -> fddp.SyncInfo:
    def step(group: Any) -> fddp.SyncInfo:
        params = {f"layers.{number}.weight": torch.ones(4) for number in range(leaves)}
        grads = {n: None if i < unused else p for i, (n, p) in enumerate(params.items())}
        with fddp.GradSync(params, group=group) as sync:
            return sync(grads, with_info=True)[1]  # type: ignore[no-any-return]

    return fddp.loopback(2, step)[0]


def test_held_bytes_are_those_of_buckets_whose_results_are_kept() -> None:
    """More of them than the pool keeps for reuse; buckets without kept results do not count."""
    params = {"large": torch.ones(1000), "other": torch.ones(500), "small": torch.ones(1)}
    plan = fddp.plan_buckets(params, order=[0, 2, 1], bucket_cap_mb=[4004 / 2**20, 1])
    assert [bucket.leaves for bucket in plan.buckets] == [(0, 2), (1,)]

    def keep(group: Any) -> list[int]:
        with fddp.GradSync(plan, group=group) as sync:
            kept, held = [], []
            for _ in range(5):
                results, info = sync(params, with_info=True)
                kept.append(results["small"])
                held.append(info.held_bytes)
                del results
            kept = [gradient.clone() for gradient in kept]
            held.append(sync(params, with_info=True)[1].held_bytes)
            return held

    for first, *kept, cloned in fddp.loopback(2, keep):
        assert first >= 4 * 1501
        assert kept == [first + number * 4004 for number in (1, 2, 3, 4)]
        assert cloned == first


def test_the_repr_is_short_and_shows_exceptions_only() -> None:
    info = info_of(300, unused=5)
    shown = repr(info)
    assert len(shown) < 300
    assert shown.startswith(
        "SyncInfo(step: 0, active: 2 of 2 ranks, total weight: 2, used: 295 leaves, unused: 5 "
        "leaves ('layers.0.weight', 'layers.1.weight', 'layers.2.weight', …), gradient norm: "
        "34.35, transport: loopback, time: "
    )
    assert "<td>unused</td><td>5 leaves (&#x27;layers.0.weight&#x27;" in info._repr_html_()
    usual = info_of(1)
    shown = repr(usual)
    assert "used: 1 leaf," in shown
    assert not [name for name in ("unused", "repaired", "skipped", "finite") if name in shown]
    shown = repr(replace(usual, all_finite=False, repaired=(0, 2), skipped=True))
    assert shown.endswith(" ms, all finite: no, repaired: 2 buckets, skipped: yes)")
