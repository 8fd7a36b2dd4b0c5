"""`check_equivalence`: a check that a training step does on n ranks what it does on one device."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from fddp.errors import EquivalenceError
from fddp.extend import VirtualRanks, counted, entrance
from fddp.testing.equivalence.causes import Case, cause_of, change, ratio_of
from fddp.testing.equivalence.parts import other_orders, sizes_text, split_rows
from fddp.testing.equivalence.rounding import FewerBits, differing, spread_of, with_other_bits
from fddp.testing.equivalence.trials import Trial, Values, buffers_of
from fddp.testing.replication.leaves import input_of
from fddp.testing.replication.runs import program
from fddp.testing.replication.values import is_same

Split: TypeAlias = Callable[[Any, Sequence[int]], Sequence[Any]]


@entrance
def check_equivalence(
    step: Callable[..., Any],
    state: Sequence[Any],
    batch: Sequence[Any],
    *,
    parts: Sequence[Sequence[int]] = ((3, 5), (1, 2, 5)),
    steps: int = 2,
    split: Split = split_rows,
    virtual_ranks: int | None = None,
) -> None:
    """Check that a training step does on several ranks what it does on one device.

    The step runs on one rank with the whole batch, and on ranks that are threads of this process
    with a part of its rows each. All get copies of the state, in float64 if the step can compute in
    it; the next step goes on from there. After each step the state of each rank must be that of one
    device, up to rounding, which is measured with the rows in other orders. On failure the step
    runs on other parts, to find the cause.

    Args:
        step: called as `step(*state, *batch)`, with `group=` if it has such a parameter. Each
            `GradSync` and wrapped module must be made within it.
        state: what the step takes over from the last one: trees, modules, optimizers, generators.
            Trees are written in place, or their successors are returned: as the first elements of a
            tuple, or as the result. What else it returns is compared where it is floating-point and
            equal on all ranks, such as a mean loss.
        batch: trees of arrays, with rows along the first axis. The rows of micro-batches are cut,
            too. Numbers are the same on all ranks.
        parts: for each number of ranks, the numbers of rows by rank in relation to each other.
            Where all ranks always have as many rows, pass `((1, 1), (1, 1, 1))`.
        steps: number of steps.
        split: makes the batches of ranks for other batches: called with the batch, as a tuple, and
            with one of `parts`. Causes are not looked for.
        virtual_ranks: number of virtual ranks of the step. Each element of `batch` is then a
            sequence with an item for each, a rank gets those that it carries, and the bits must be
            the same on as many ranks as there are `parts`, without float64.

    Raises:
        EquivalenceError: the state or a result differs; the text has the leaf, the ratio of the
            changes and the likely cause.
        TypeError: a leaf of the state can't be compared, or one of the batch has no rows.
        ValueError: the step changes nothing, or the batch has too few rows.
        Exception: an error of the step.

    Warns:
        UserWarning: only a buffer of a module differs.

    Example:
        >>> import fddp, torch
        >>> def step(params, x):
        ...     grads = torch.func.grad(lambda p: (x @ p["w"]).square().sum())(params)
        ...     count = fddp.psum(torch.tensor(len(x)))
        ...     return fddp.tree_map(lambda p, g: p - 0.1 * g / count, params, fddp.psum(grads))
        >>> check_equivalence(step, state=({"w": torch.ones(3)},), batch=(torch.rand(8, 3),))
    """
    __tracebackhide__ = True
    named = program(step, state, batch, 2)
    if virtual_ranks is not None:
        split = _by_virtual_rank(virtual_ranks)
    batch, orders = (*batch,), other_orders(batch) if split is split_rows else []
    batches = {(*ratios,): split(batch, ratios) for ratios in parts}
    for is_double in (True, False) if virtual_ranks is None else (False,):
        trial = Trial(step, named.replicated, named.takes_group, steps, is_double)
        try:
            bits = FewerBits()
            one = trial._replace(step=bits.around(step)).run([batch])[0]
            others = [trial.run([order])[0] for order in orders]
            runs = {ratios: trial.run(own) for ratios, own in batches.items()}
            break
        except Exception:
            if not is_double:
                raise
            # The step may not take float64.
    if not with_other_bits(one[0], one[-1]):
        raise ValueError(
            "the step changes nothing of its state and returns no floating-point numbers; return "
            "the new state, or write it in place"
        )
    buffers = buffers_of(named.replicated)
    for number in range(1, steps + 1):
        before, after = one[0], one[number]
        spread = spread_of(before, after, [other[number] for other in others], bits.unit)
        for ratios, ranks in runs.items():
            many = [values[number] for values in ranks]
            if virtual_ranks is None:
                found = [differing(after, values, spread) for values in many]
            else:
                found = [with_other_bits(after, values) for values in many]
            paths = _without_own_results(found, many)
            if paths and buffers.issuperset(paths):
                warnings.warn(
                    f"the buffer {paths[0]} on {len(ratios)} ranks is not that of one device, as "
                    f"statistics of a rank's rows are not",
                    stacklevel=3,
                )
            elif paths:
                paths = [path for path in paths if path not in buffers]
                case = Case(trial._replace(steps=number), batch, ratios, before, after, many, paths)
                if virtual_ranks is not None:
                    text = (
                        ": virtual ranks give the same bits if each sum, weight and random number "
                        "is that of a virtual rank, and not of a rank"
                    )
                elif split is split_rows:
                    text = f" with {sizes_text(batch, ratios)}: {cause_of(case)}"
                else:
                    text = ": for its cause, pass a batch with rows, without split="
                raise _error(case, text)


def _without_own_results(found: Sequence[Sequence[str]], many: Sequence[Values]) -> list[str]:
    """Paths that differ on some rank, without results that each rank has for itself."""
    paths = dict.fromkeys(path for own in found for path in own)
    return [
        path
        for path in paths
        if input_of(path) != "result"
        or all(path in values and is_same(many[0][path], values[path]) for values in many)
    ]


def _error(case: Case, text: str) -> EquivalenceError:
    """The error of a difference, with the text that follows the numbers of ranks."""
    path = case.most_different[0]
    ratio = ratio_of(change(case.before, case.one, path), change(case.before, case.many[0], path))
    also = f" (and {counted(len(case.paths) - 1, 'leaf')} more)" if case.paths[1:] else ""
    times = f"changed {ratio:.4g} times as much as" if math.isfinite(ratio) else "is not that"
    return EquivalenceError(
        f"{path}{also} {times} on one device after step {case.trial.steps}, on {case.ranks} ranks"
        f"{text}",
        path=path,
        ratio=ratio,
    )


def _by_virtual_rank(count: int) -> Split:
    """A function that gives ranks the items of the virtual ranks that they carry."""

    def split(batch: Any, ratios: Sequence[int]) -> Sequence[Any]:
        runs = VirtualRanks.over(count, len(ratios)).runs
        return [tuple(own[run.start : run.stop] for own in batch) for run in runs]

    return split
