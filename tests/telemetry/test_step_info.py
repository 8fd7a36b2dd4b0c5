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
