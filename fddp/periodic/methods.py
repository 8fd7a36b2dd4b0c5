"""Periodic schedules of published methods, for the tree of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fddp import plan_buckets
from fddp.extend import LeafSpec, entrance
from fddp.periodic.schedule import Fragment, Periodic, PeriodicSchedule


@entrance
def local_sgd(
    tree: Any, period: int | Periodic = 100, *, delay: int = 0, mixing: float = 0.0
) -> PeriodicSchedule:
    """Return the schedule of local SGD and of DiLoCo: all leaves are averaged once in a period.

    They differ in the outer optimizer that is passed to `PeriodicSync`.

    Args:
        tree: parameters, of which paths, shapes and dtypes are used; or an `nn.Module`.
        period: number of steps between averages, the first of which is after this number of steps;
            or a `Periodic`. The paper on DiLoCo calls it H.
        delay, mixing: as for `Fragment`.

    Raises:
        NoGradientError: the tree has no leaf of a floating or complex dtype.
        ScheduleError, ValueError: as for `Fragment`.

    Example:
        >>> import torch
        >>> schedule = local_sgd({"w": torch.zeros(3)}, 4)
        >>> [step for step in range(12) if schedule.due(step)]
        [3, 7, 11]
    """
    when = period if isinstance(period, Periodic) else Periodic(period, warmup_steps=period - 1)
    return PeriodicSchedule((_fragment(_averaged(tree), when, delay, mixing),))


diloco = local_sgd


@entrance
def streaming_diloco(
    tree: Any, period: int = 100, *, fragments: int = 4, delay: int = 1, mixing: float = 0.5
) -> PeriodicSchedule:
    """Return the schedule of Streaming DiLoCo: fragments are averaged in turn, each once in a
    period.

    Layer i belongs to fragment `i % fragments`, the strided pattern of the paper. A layer is all
    leaves whose paths agree up to the first number, or in the first key for paths without a number.

    Args:
        tree: as for `local_sgd`. Layers are in the order of its containers.
        period: number of inner steps between averages of a fragment.
        fragments: number of fragments; at most `period`, and at most the number of layers.
        delay: number of inner steps that overlap with the collective of a fragment.
        mixing: as for `Fragment`.

    Raises:
        NoGradientError, ScheduleError, ValueError: as for `local_sgd`; or there are too many
            fragments.

    Example:
        >>> import torch
        >>> tree = {"layers": [torch.zeros(2) for _ in range(4)]}
        >>> schedule = streaming_diloco(tree, 10, fragments=2)
        >>> [fragment.paths for fragment in schedule.fragments]
        [('layers.0', 'layers.2'), ('layers.1', 'layers.3')]
        >>> [(step, *schedule.due(step)[0]) for step in range(12) if schedule.due(step)]
        [(4, 'start', 0), (5, 'apply', 0), (9, 'start', 1), (10, 'apply', 1)]
    """
    layers: dict[str, list[LeafSpec]] = {}
    for leaf in _averaged(tree):
        layers.setdefault(_layer(leaf.path), []).append(leaf)
    most = min(period, len(layers))
    if type(fragments) is not int or not 1 <= fragments <= most:
        raise ValueError(
            f"fragments must be an int from 1 to {most}, because there are {len(layers)} layers "
            f"and the period is {period}; got {fragments!r}"
        )
    parts = []
    for number in range(fragments):
        leaves = [leaf for layer in [*layers.values()][number::fragments] for leaf in layer]
        when = Periodic(period, warmup_steps=(number + 1) * period // fragments - 1)
        parts.append(_fragment(leaves, when, delay, mixing))
    return PeriodicSchedule(tuple(parts))


def _averaged(tree: Any) -> list[LeafSpec]:
    """Return the leaves of a floating or complex dtype, in the order of the tree's containers."""
    plan = plan_buckets(tree)
    return [plan.leaves[leaf] for leaf in reversed(plan.order)]


def _fragment(leaves: Sequence[LeafSpec], when: Periodic, delay: int, mixing: float) -> Fragment:
    nbytes = sum(leaf.nbytes for leaf in leaves)
    return Fragment(tuple(leaf.path for leaf in leaves), nbytes, when, delay, mixing)


def _layer(path: str) -> str:
    """Return the part of a path that names its layer.

    >>> _layer("layers.3.attention.weight"), _layer("head.weight")
    ('layers.3', 'head')
    """
    keys = path.split(".")
    numbers = [position for position, key in enumerate(keys) if key.isdigit()]
    return ".".join(keys[: numbers[0] + 1 if numbers else 1])
