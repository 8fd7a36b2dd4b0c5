"""Information on one step, returned with `with_info=True`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from fddp.core.numerics.noise_scale import SquaredNorms
from fddp.core.protocol.launch import TraceAction
from fddp.core.tables import html_table
from fddp.core.text import counted
from fddp.core.timeline import StepTimes

_MOST_PATHS = 3  # in a repr


@dataclass(frozen=True)
class Trace:
    """Actions of the runtime in order, in the terms of `fddp.core.protocol.launch`.

    Attributes:
        sequence: buckets in launch order.
        bucket_of: for each differentiated leaf its bucket, or -1.
        expected: for each differentiated leaf, the number of gradients waited for.
        events: index of a leaf for the arrival of its gradient, or a `TraceAction`.
    """

    sequence: tuple[int, ...]
    bucket_of: tuple[int, ...]
    expected: tuple[int, ...]
    events: tuple[int | TraceAction, ...]


@dataclass(frozen=True, repr=False)
class SyncInfo:
    """Result of one synchronisation, equal on all ranks except for `timeline`, `trace`,
    `held_bytes` and `SquaredNorms.own`.

    If ranks hold different results, as with shards (`reduce_scatter`) or a `fddp.hooks.TorchHook`
    that returns different values, `grad_norm` and the part of `all_finite` on results are those of
    this rank. With `nonfinite="skip"` or "raise", `all_finite` is equal on all ranks in any case.

    Its repr is a summary; the fields have the paths and times.

    Attributes:
        step: number of this synchronisation, from 0.
        world_size: number of ranks in the group.
        active: number of ranks that contributed (weight above zero).
        total_weight: sum of weights over ranks.
        used: paths of the leaves that at least one rank used, in canonical order.
        unused: paths of the reduced leaves that no rank used; their gradients are None.
        grad_norm: L2 norm of the synchronised gradients, without leaves kept local.
        all_finite: True if no contribution and no result contains NaN or infinity.
        repaired: buckets that were reduced a second time.
        transport: name of the transport.
        transport_reason: reason for the choice of the transport.
        timeline: times at which each bucket was ready, launched and done on this rank.
        trace: actions of the runtime on this rank; empty for `sync(grads)`.
        skipped: True if all ranks skipped the step because a value was not finite and
            `nonfinite="skip"` is set; `grad_norm` is then NaN.
        stop: True if a rank has asked all ranks to stop; see `GradSync.stopping`.
        squared_norms: squared norms of gradients by group of leaves, for
            `fddp.numerics.next_noise_scale`; empty unless the `GradSync` was made with `noise`.
            Norms of the mean are NaN in a skipped or repaired step, and totals if another rank has
            asked for no info.
        held_bytes: bytes of the buckets of this and earlier steps that results still use on this
            rank. It grows if gradients are kept; `clone` them.
    """

    step: int
    world_size: int
    active: int
    total_weight: float
    used: tuple[str, ...]
    unused: tuple[str, ...]
    grad_norm: float
    all_finite: bool
    repaired: tuple[int, ...]
    transport: str
    transport_reason: str
    timeline: StepTimes
    trace: Trace
    skipped: bool = False
    stop: bool = False
    squared_norms: Mapping[str, SquaredNorms] = field(default_factory=dict)
    held_bytes: int = 0

    def __repr__(self) -> str:
        return f"SyncInfo({', '.join(f'{name}: {text}' for name, text in self._rows())})"

    def _repr_html_(self) -> str:
        return html_table("SyncInfo", ("", ""), self._rows())

    def _rows(self) -> list[tuple[str, str]]:
        rows = [
            ("step", str(self.step)),
            ("active", f"{self.active} of {counted(self.world_size, 'rank')}"),
            ("total weight", f"{self.total_weight:g}"),
            ("used", counted(len(self.used), "leaf")),
            ("gradient norm", f"{self.grad_norm:.4g}"),
            ("transport", self.transport),
            ("time", f"{(self.timeline.end_s - self.timeline.begun_s) * 1e3:.2f} ms"),
        ]
        if self.unused:
            more = ", …" if len(self.unused) > _MOST_PATHS else ""
            paths = ", ".join(map(repr, self.unused[:_MOST_PATHS]))
            rows.insert(4, ("unused", f"{counted(len(self.unused), 'leaf')} ({paths}{more})"))
        if not self.all_finite:
            rows.append(("all finite", "no"))
        if self.repaired:
            rows.append(("repaired", counted(len(self.repaired), "bucket")))
        if self.skipped:
            rows.append(("skipped", "yes"))
        return [*rows, ("stop", "yes")] if self.stop else rows


class GraphInfo(NamedTuple):
    """Numbers of a step in a graph of `torch.compile`: tensors of float64 and shape () on the CPU.
    `GradSync.graph_info` has all information, once the graph has run.

    Attributes:
        step, active, total_weight, grad_norm, all_finite: as in `SyncInfo`.
    """

    step: Tensor
    active: Tensor
    total_weight: Tensor
    grad_norm: Tensor
    all_finite: Tensor
