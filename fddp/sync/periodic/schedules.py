"""Periodic schedules of published methods, for the tree of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from fddp.core.plan.leaf import LeafSpec
from fddp.core.schedule.periodic import Fragment, PeriodicSchedule, make_periodic_schedule
from fddp.core.schedule.periods import Periodic
from fddp.sync.periodic.averaged_tree import AveragedTree

Pattern = Literal["strided", "sequential"]


def local_sgd(
    tree: Any, period: int | Mapping[str, int] | Periodic, *, delay: int = 0, mixing: float = 0.0
) -> PeriodicSchedule:
    """Return the schedule of local SGD: all parameters are averaged once in a period.

    Args:
        tree: parameters, of which paths, shapes and dtypes are used; or an `nn.Module`.
        period: number of steps between averages, the first of which is after this number of steps;
            one for each axis of a mesh, outermost first, where the first average, along all axes,
            is after the shortest; or a `Periodic`.
        delay, mixing: as for `Fragment`.

    Raises:
        NoGradientError: the tree has no leaf of a floating or complex dtype.
        ValueError: an argument is invalid.

    Example:
        >>> import torch
        >>> schedule = local_sgd({"w": torch.zeros(3)}, 4)
        >>> [step for step in range(12) if schedule.due(step)]
        [3, 7, 11]
    """
    leaves, _ = _described(tree)
    everything = tuple(range(len(leaves)))
    when = period if isinstance(period, Periodic) else _after(period)
    return make_periodic_schedule(leaves, [Fragment(everything, when, delay, mixing)])


def diloco(
    tree: Any, period: int = 100, *, delay: int = 0, mixing: float = 0.0
) -> PeriodicSchedule:
    """Return the schedule of DiLoCo: all outer gradients are averaged once in a period.

    It is that of `local_sgd`; pass an outer optimizer to `PeriodicSync`.

    Args:
        tree: as for `local_sgd`.
        period: number of inner steps, called H in the paper.
        delay, mixing: as for `Fragment`.

    Raises:
        NoGradientError, ValueError: as for `local_sgd`.
    """
    return local_sgd(tree, period, delay=delay, mixing=mixing)


def streaming_diloco(
    tree: Any,
    period: int = 100,
    *,
    fragments: int = 4,
    pattern: Pattern = "strided",
    delay: int = 1,
    mixing: float = 0.5,
) -> PeriodicSchedule:
    """Return the schedule of Streaming DiLoCo: fragments are averaged in turn, each once in a
    period.

    Layers are divided over the fragments. A layer is all leaves whose paths agree up to the first
    number, or in the first key for paths without a number.

    Args:
        tree: as for `local_sgd`. Layers are in the order of its containers.
        period: number of inner steps between averages of a fragment.
        fragments: number of fragments; at most `period`, and at most the number of layers.
        pattern: "strided" gives layer i to fragment `i % fragments`; "sequential" gives each
            fragment neighbouring layers of about the same number of bytes.
        delay: number of inner steps that overlap with the collective of a fragment.
        mixing: as for `Fragment`.

    Raises:
        NoGradientError, ValueError: as for `local_sgd`; or there are too many fragments.

    Example:
        >>> import torch
        >>> tree = {"layers": [torch.zeros(2) for _ in range(4)]}
        >>> schedule = streaming_diloco(tree, 10, fragments=2)
        >>> [schedule.paths(number) for number in range(2)]
        [('layers.0', 'layers.2'), ('layers.1', 'layers.3')]
        >>> [(step, *schedule.due(step)[0][1:3]) for step in range(12) if schedule.due(step)]
        [(4, 'start', 0), (5, 'apply', 0), (9, 'start', 1), (10, 'apply', 1)]
    """
    leaves, layers = _described(tree)
    if type(fragments) is not int or not 1 <= fragments <= min(period, len(layers)):
        raise ValueError(
            f"fragments must be an int from 1 to {min(period, len(layers))}, because there are "
            f"{len(layers)} layers and the period is {period}; got {fragments!r}"
        )
    if pattern not in _PATTERNS:
        raise ValueError(f"pattern must be one of {', '.join(_PATTERNS)}, got {pattern!r}")
    parts = _PATTERNS[pattern](leaves, layers, fragments)
    return make_periodic_schedule(
        leaves,
        [
            Fragment(
                tuple(sorted(part)),
                Periodic(period, warmup_steps=(number + 1) * period // fragments - 1),
                delay,
                mixing,
            )
            for number, part in enumerate(parts)
        ],
    )


def layerwise(tree: Any, period: int = 10, *, delay: int = 0) -> PeriodicSchedule:
    """Return the schedule of layer-wise partial synchronisation, as in DreamDDP: after each step
    some layers are averaged, and every layer once in a period.

    Args:
        tree: as for `streaming_diloco`.
        period: number of inner steps between averages of a layer.
        delay: as for `Fragment`.

    Raises:
        NoGradientError, ValueError: as for `local_sgd`.
    """
    _, layers = _described(tree)
    return streaming_diloco(
        tree,
        period,
        fragments=min(period, len(layers)),
        pattern="sequential",
        delay=delay,
        mixing=0.0,
    )


def _after(period: int | Mapping[str, int]) -> Periodic:
    """Return averages of which the first is after the shortest period."""
    return Periodic(period, warmup_steps=Periodic(period).shortest - 1)


def _described(tree: Any) -> tuple[tuple[LeafSpec, ...], list[list[int]]]:
    """Return the leaves, and the layers as lists of leaves, in the order of the tree."""
    described = AveragedTree.of(tree)
    numbers = {spec.path: number for number, spec in enumerate(described.specs)}
    layers: dict[str, list[int]] = {}
    for path in described.averaged:
        layers.setdefault(_layer(path), []).append(numbers[path])
    return described.specs, [*layers.values()]


def _layer(path: str) -> str:
    """Return the part of a path that names its layer.

    >>> _layer("layers.3.attention.weight"), _layer("head.weight")
    ('layers.3', 'head')
    """
    keys = path.split(".")
    numbers = [position for position, key in enumerate(keys) if key.isdigit()]
    return ".".join(keys[: numbers[0] + 1 if numbers else 1])


def _strided(
    leaves: Sequence[LeafSpec], layers: Sequence[list[int]], count: int
) -> list[list[int]]:
    return [[leaf for layer in layers[number::count] for leaf in layer] for number in range(count)]


def _sequential(
    leaves: Sequence[LeafSpec], layers: Sequence[list[int]], count: int
) -> list[list[int]]:
    sizes = [sum(leaves[leaf].nbytes for leaf in layer) for layer in layers]
    parts: list[list[int]] = [[] for _ in range(count)]
    number, filled, total = 0, 0, sum(sizes)
    for position, (layer, size) in enumerate(zip(layers, sizes, strict=True)):
        is_full = (filled + size / 2) * count > total * (number + 1)
        must_close = len(layers) - position == count - 1 - number  # one layer for each that is left
        if parts[number] and number < count - 1 and (is_full or must_close):
            number += 1
        parts[number] += layer
        filled += size
    return parts


_PATTERNS: Mapping[str, Callable[..., list[list[int]]]] = {
    "strided": _strided,
    "sequential": _sequential,
}
