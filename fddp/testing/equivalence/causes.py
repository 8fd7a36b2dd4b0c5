"""Likely causes of a difference, found by runs on other batches and parts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import BatchNorm1d, BatchNorm2d, BatchNorm3d

from fddp.testing.equivalence.parts import (
    all_counted,
    divisible,
    first_half,
    repeated,
    scaled,
    split_rows,
)
from fddp.testing.equivalence.rounding import difference, floats, rounding
from fddp.testing.equivalence.trials import Trial, Values
from fddp.testing.replication.values import is_same

BatchNorm: TypeAlias = BatchNorm1d | BatchNorm2d | BatchNorm3d

_CLOSE = 1e-3
_SAME = 1e-4  # ratios of two ranks that are near 1 add up to nearly 2 by accident
_FACTORS = (1.0, 1e3, 1e-3)  # on the batch; small numbers stay below limits of clips


class Case(NamedTuple):
    """A difference to explain.

    Attributes:
        trial: the step, for as many steps as the difference takes.
        batch: all rows.
        ratios: numbers of rows by rank, in relation.
        before, one: values before the first step, and after the last one on one device.
        many: values after the last step, by rank.
        paths: of the values that differ.
    """

    trial: Trial
    batch: Any
    ratios: Sequence[int]
    before: Values
    one: Values
    many: Sequence[Values]
    paths: Sequence[str]

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.ratios)

    @property
    def most_different(self) -> list[str]:
        """Paths that differ by a large part of their change, beginning with the largest: others
        follow in other ways, as Adam's parameters do from a factor on gradients."""
        parts: dict[str, float] = {}
        for path in self.paths:
            changed, apart = change(self.before, self.one, path), self.apart(path)
            most = 0.0 if changed is None else float(changed.abs().max())
            parts[path] = apart / most if most and apart < math.inf else 1.0
        order = sorted(self.paths, key=lambda path: -parts[path])
        return [path for path in order if parts[path] >= _CLOSE * parts[order[0]]]

    def apart(self, path: str) -> float:
        """Largest difference of a rank from one device."""
        return max(difference(self.one.get(path), values.get(path)) for values in self.many)

    def on_one(self, batch: Any, **options: Any) -> Values:
        """Values on one device."""
        return self.trial.run([batch], **options)[0][-1]

    def on_ranks(self, batches: Sequence[Any], **options: Any) -> Values:
        """Values of rank 0."""
        return self.trial.run(batches, **options)[0][-1]


def cause_of(case: Case) -> str:
    """The likely cause as a sentence, with the way out."""
    if not _is_repeatable(case):
        return (
            "the step does not do the same twice on one device: pass everything that it writes as "
            "state"
        )
    case = case._replace(paths=case.most_different)
    for cause in (
        *(_of_replicas, _of_factors, _of_sizes, _of_counts, _of_batch_norm, _of_clips),
        _of_random_numbers,
    ):
        try:
            text = cause(case)
        except Exception:  # of the step, to which other rows may be invalid
            continue
        if text:
            return text
    return (
        "a rank's rows do not contribute what they do in the whole batch: the step depends on them "
        "in another way than by a mean or sum over rows"
    )


def ratio_of(one: Tensor | None, other: Tensor | None) -> float:
    """Factor between two changes; NaN if they are not proportional."""
    if one is None or other is None or one.shape != other.shape or not one.norm() > 0:
        return math.nan
    ratio = float(one @ other / (one @ one))
    return ratio if (other - ratio * one).norm() <= _CLOSE * other.norm() else math.nan


def change(before: Values, after: Values, path: str, /) -> Tensor | None:
    """Change of a value; the value itself if there was none before."""
    start, end = floats(before.get(path)), floats(after.get(path))
    if end is None or start is None or start.shape != end.shape:
        return end
    return end - start


def _is_repeatable(case: Case) -> bool:
    again = case.on_one(case.batch)
    return all(is_same(value, again.get(path)) for path, value in case.one.items())


# Replicas that differ


def _of_replicas(case: Case) -> str:
    apart = [
        path
        for path in case.paths
        if not all(_agree(case, case.many[0], own, path) for own in case.many)
    ]
    if not apart:
        return ""
    for path in apart:
        own = change(case.before, case.one, path)
        ratios = [ratio_of(own, change(case.before, values, path)) for values in case.many]
        if all(math.isfinite(ratio) and ratio for ratio in ratios):
            total = sum(1.0 / ratio for ratio in ratios)
            if any(abs(total - wanted) <= _SAME * wanted for wanted in (1.0, case.ranks)):
                factors = " and ".join(f"{ratio:.3g}" for ratio in ratios)
                return (
                    f"a count of this rank divides what is summed over ranks (the ranks have "
                    f"{factors} times the change): divide by the count of all ranks, "
                    f"fddp.psum(count)"
                )
            if abs(sum(ratios) - 1.0) <= _SAME:
                shares = " and ".join(f"{ratio:.3g}" for ratio in ratios)
                return (
                    f"each rank has a part of a sum, such as a count of its rows (the ranks have "
                    f"{shares} of the change): add them up, fddp.psum(count)"
                )
    return (
        "the ranks differ from each other, because a gradient is not averaged, or state is of this "
        "rank alone: check_replication finds the line, by functions of the rank if it depends on "
        "the number of rows"
    )


# The same rows on each rank


def _of_factors(case: Case) -> str:
    """Causes that multiply the change, also if all ranks have the same rows.

    Compared is by how much the values of two batches differ, in which weight decay and all else
    that does not depend on the batch cancels.
    """
    n = case.ranks
    for factor in _FACTORS:
        batch = scaled(case.batch, factor)
        half = first_half(batch)
        once = case.on_one(half), case.on_one(batch)
        repeats = case.on_one(repeated(half, n)), case.on_one(repeated(batch, n))
        ranks = case.on_ranks([half] * n), case.on_ranks([batch] * n)
        if _has_factor(case, repeats, ranks, n):
            return _sum_text(n, _has_factor(case, once, repeats, n))
        # Before 1/n: squares of gradients, which Adam has, change by the square of the factor.
        if _has_factor(case, repeats, ranks, n**-0.5):
            return (
                f"a norm is summed over ranks, of values that are equal on all of them: it is "
                f"sqrt({n}) times too large, and so the factor {n**-0.5:.3f}; remove the psum of "
                f"its squares"
            )
        if _has_factor(case, repeats, ranks, 1 / n):
            averaged = case._replace(paths=[*_with_factor(case, repeats, ranks, 1 / n)])
            return _mean_text(averaged, _has_factor(case, once, repeats, n))
    return ""


def _has_factor(
    case: Case, ones: tuple[Values, Values], others: tuple[Values, Values], factor: float
) -> bool:
    """Return True if two runs differ by a factor times as much as two others, in some value."""
    return any(True for _ in _with_factor(case, ones, others, factor))


def _with_factor(
    case: Case, ones: tuple[Values, Values], others: tuple[Values, Values], factor: float
) -> Iterator[str]:
    """Paths of values in which two runs differ by a factor times as much as two others, and that
    depend on the batch by more than a small part of their change."""
    for path in case.paths:
        own, changed = change(*ones, path), change(case.before, ones[1], path)
        if own is None or changed is None or own.norm() < _CLOSE * changed.norm():
            continue
        if _is_close(ratio_of(own, change(*others, path)), factor):
            yield path


def _sum_text(n: int, grows_with_rows: bool) -> str:
    if grows_with_rows:
        return f"a sum over ranks is taken twice: the factor is {n}; remove one of the two"
    return (
        f"it is summed over ranks where the mean is meant: the factor is {n}, the number of ranks; "
        f"write pmean for psum, or divide by group.size or by a sum over ranks"
    )


def _mean_text(case: Case, grows_with_rows: bool) -> str:
    if not grows_with_rows:
        return (
            f"it is divided by the number of ranks twice: the factor is 1/{case.ranks}; remove the "
            f"second mean, or the division by group.size"
        )
    if _is_additive(case):
        return (
            f"a sum over rows is averaged over ranks: the factor is 1/{case.ranks}; write psum for "
            f"pmean, or divide by the number of rows"
        )
    return (
        f"accumulated micro-batches are not divided by their number, which depends on the rows of "
        f"a rank: the factor is 1/{case.ranks}; divide by the number of micro-batches"
    )


def _is_additive(case: Case) -> bool:
    """Return True if changes by the parts of a batch have the same sum however it is cut."""
    sums = []
    for ratios in ((3, 5), (1, 1000)):
        one, other = (case.on_one(part) for part in split_rows(case.batch, ratios))
        sums.append({path: _sum(case, one, other, path) for path in case.paths})
    return all(_is_close(ratio_of(sums[0][path], sums[1][path]), 1.0) for path in case.paths)


def _sum(case: Case, one: Values, other: Values, path: str) -> Tensor | None:
    first, second = change(case.before, one, path), change(case.before, other, path)
    return None if first is None or second is None else first + second


# Other rows on each rank


def _of_sizes(case: Case) -> str:
    if len({*case.ratios}) == 1 or not _agrees_on_even_parts(case, case.batch):
        return ""
    return (
        "it is a mean of means: each rank counts alike, whatever its rows; weight it by rows, such "
        "as by GradSync's weight=len(batch), or divide a psum of sums by a psum of counts"
    )


def _of_counts(case: Case) -> str:
    if not _agrees_on_even_parts(case, all_counted(case.batch)):
        return ""
    return (
        "a count of this rank divides, of labels that are not ignored or of a mask: divide a psum "
        "of sums by a psum of counts, or pass the count as weight="
    )


def _of_batch_norm(case: Case) -> str:
    is_there = bool(_batch_norms(case.trial.state))
    if not is_there or not _agrees_on_even_parts(case, case.batch, change_=_without_statistics_):
        return ""
    return (
        "BatchNorm normalises by the statistics of this rank's rows: use statistics of all ranks, "
        "as SyncBatchNorm does, or a layer without them, such as GroupNorm"
    )


def _of_clips(case: Case) -> str:
    """A norm, or a limit of elements, that is the same for all rows on one device, and not on
    several ranks."""
    for factor in _FACTORS[:2]:
        batch = scaled(case.batch, factor)
        parts = split_rows(batch, case.ratios)
        ones = [case.on_one(own) for own in (batch, *parts)]
        many = case.on_ranks(parts)
        for paths in _groups(case.one):
            changes = [_changes(case.before, values, paths) for values in (*ones, many)]
            for size in (Tensor.norm, _limit):
                *on_one, on_ranks = (float(size(own)) if len(own) else 0.0 for own in changes)
                are_equal = on_one[0] > 0 and all(_is_close(own, on_one[0]) for own in on_one)
                if are_equal and not _is_close(on_ranks, on_one[0]):
                    return (
                        "gradients are clipped or normalised before the mean: their size is the "
                        "same for all rows, and no longer after the mean; clip after the mean"
                    )
    return ""


def _of_random_numbers(case: Case) -> str:
    one = case.on_one(case.batch, seed=1)
    many = case.on_ranks(split_rows(case.batch, case.ratios), seed=1)
    apart = change(case.one, case.many[0], case.paths[0]), change(one, many, case.paths[0])
    if _is_close(ratio_of(*apart), 1.0):
        return ""
    return (
        "random numbers of a rank are not those of its rows on one device, as in dropout: turn "
        "them off for this check, or draw them with fddp.virtual_rng and pass virtual_ranks="
    )


def _agrees_on_even_parts(case: Case, batch: Any, **options: Any) -> bool:
    whole = divisible(batch, case.ranks)
    one = case.on_one(whole, **options)
    many = case.on_ranks(split_rows(whole, (1,) * case.ranks), **options)
    return all(_agree(case, one, many, path) for path in case.paths)


def _groups(values: Values) -> list[list[str]]:
    """Paths by the input, and by each key: those of one moment of an optimizer, for example."""
    groups: dict[str, list[str]] = {}
    for path in values:
        for key in {*re.findall(r"\w+", path)}:
            groups.setdefault(key, []).append(path)
    return [*groups.values()]


def _changes(before: Values, after: Values, paths: Sequence[str]) -> Tensor:
    changes = (change(before, after, path) for path in paths)
    return torch.cat([torch.zeros(0), *(own for own in changes if own is not None)])


def _limit(changes: Tensor) -> Tensor:
    """Mean magnitude of the large elements: the limit of elements, if it is reached."""
    sizes = changes.abs()
    return sizes[2 * sizes > sizes.max()].mean()


def _without_statistics_(state: dict[str, Any]) -> None:
    """Let layers of BatchNorm multiply and add only."""
    for layer in _batch_norms(state):
        layer.forward = partial(_affine, layer)  # type: ignore[method-assign]


def _affine(layer: BatchNorm, x: Tensor) -> Tensor:
    shape = (-1, *(1 for _ in x.shape[2:]))
    return x if layer.weight is None else x * layer.weight.view(shape) + layer.bias.view(shape)


def _batch_norms(state: dict[str, Any]) -> list[BatchNorm]:
    modules = (value for value in state.values() if isinstance(value, torch.nn.Module))
    layers = (layer for module in modules for layer in module.modules())
    return [layer for layer in layers if isinstance(layer, BatchNorm) and layer.training]


def _agree(case: Case, one: Values, other: Values, path: str) -> bool:
    """Return True if two values differ by a small part of the difference to explain, or by
    rounding."""
    apart = case.apart(path)  # infinite for integers, of which any difference counts
    most = max(_CLOSE * apart if apart < math.inf else 0.0, _CLOSE**-1 * rounding(one.get(path)))
    return difference(one.get(path), other.get(path)) <= most


def _is_close(number: float, wanted: float) -> bool:
    return abs(number - wanted) <= 0.01 * abs(wanted)
