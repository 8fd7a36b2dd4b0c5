"""`check_replication`: a check that a training step keeps replicas equal."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import Generator

from fddp.errors import ReplicationError
from fddp.extend import Site, counted, entrance, tree_flatten
from fddp.testing.replication.lines import Lines, Origin, origin
from fddp.testing.replication.observers import (
    Collective,
    Reads,
    first_difference,
    is_reduction,
    varying_reads,
)
from fddp.testing.replication.runs import RANDOM, RANK, Outcome, Program, program
from fddp.testing.replication.values import growth, is_same, is_whole, leaves_of

_EXTREMES = (math.nan, 1e6, 0.0)
_READ_RUNS = 3
_INVALID = "raised only with changed inputs; pass a function of the rank that makes valid ones"


@entrance
def check_replication(
    step: Callable[..., Any],
    *,
    replicated: Sequence[Any] = (),
    varying: Sequence[Any] = (),
    ranks: int = 2,
) -> None:
    """Check, in one process and without ranks, that a training step keeps replicas equal.

    The step runs some ten times on copies of its inputs: as rank 0; as rank 1, with other varying
    inputs and the results of rank 0's collectives, whereupon all that is replicated must have the
    same bits; with extreme inputs, whereupon the collectives must be the same; and on more ranks.
    On failure it runs again, to find the input and the line. `GradSync`, wrapped modules and
    communicators must be made within the step, on the default group or on `group`.

    Args:
        step: called as `step(*replicated, *varying)`, with `group=` if it has such a parameter.
            `group.rank` and `group.size` are those of the run.
        replicated: inputs that are equal on all ranks: trees, modules, optimizers, generators.
            After the step they must still be equal, and so must the results: if there are n trees
            among them and the step returns a tuple, its first n elements; else all, unless there
            are modules and optimizers alone. Without replicated inputs, all results.
        varying: inputs that each rank has for itself. Where another rank's are needed, elements are
            put in another order, and floating ones made smaller; a function is called with the rank
            instead. Growth with the number of ranks is not checked if a generator is among them,
            because noise does not add up as values do, nor in steps with shards.
        ranks: number of ranks that the step seems to run on, as large as its meshes require.

    Raises:
        ReplicationError: a result or state differs between ranks; ranks would make different
            collective calls; a mean is taken of equal values, or a sum; a result grows with the
            number of ranks.
        ValueError: a varying input has no numbers to change.
        Exception: an error of the step.

    Warns:
        UserWarning: a buffer of a module differs between ranks.

    Example:
        >>> import fddp, torch
        >>> def step(params, batch):
        ...     grads = torch.func.grad(lambda p: (p["w"] - batch).square().mean())(params)
        ...     return fddp.tree_map(lambda p, g: p - 0.1 * g, params, fddp.pmean(grads))
        >>> check_replication(step, replicated=({"w": torch.ones(3)},), varying=(torch.rand(3),))
    """
    __tracebackhide__ = True
    if ranks < 2:
        raise ValueError(f"ranks={ranks}: replicas are at least two")
    checked = program(step, replicated, varying, ranks)
    reads = Reads()
    usual = checked.run(frozenset(), reads=reads)
    if usual.error is not None:
        raise usual.error
    other_reads = Reads()
    other = checked.run(frozenset(checked.causes), earlier=usual.collectives, reads=other_reads)
    read_at = varying_reads(usual.reads, other.reads)
    _check_collectives(usual, other, read_at)
    if other.error is not None:
        raise ReplicationError(f"the step {_INVALID}: {other.error!r}") from other.error
    _check_values(checked, usual, other, None)
    others = [other]
    for factor in _EXTREMES:
        extreme = checked.run(frozenset(checked.varying), earlier=usual.collectives, factor=factor)
        _check_collectives(usual, extreme, read_at)
        if extreme.error is None:
            _check_values(checked, usual, extreme, factor)
            others += [extreme] if math.isnan(factor) and checked.varying else []
    _check_redundant(usual, others)
    for seed in range(_READ_RUNS if read_at else 0):
        misled = checked.run(frozenset(), earlier=usual.collectives, reads=Reads(read_at, seed))
        _check_collectives(usual, misled, read_at)
    _check_growth(checked, usual)
    _warn_of_buffers(usual, other)


# Different collectives


def _check_collectives(usual: Outcome, other: Outcome, read_at: frozenset[Site]) -> None:
    __tracebackhide__ = True
    difference = first_difference(usual.collectives, other.collectives)
    if difference is None or (other.error is not None and difference[1] is None):
        return
    one, two = (_named(collective) for collective in difference)
    read = (
        f"This depends on a number that differs between ranks, read at {_some(read_at)}; decide by "
        f"one that is equal on all ranks, such as fddp.pmean(loss)"
        if read_at
        else "This depends on the rank, or on the shapes of its inputs; make the same calls on all "
        "ranks"
    )
    first = difference[0] or difference[1]
    raise ReplicationError(
        f"ranks would make different collective calls, and hang or fail: one {one}, where another "
        f"{two}. {read}",
        line="" if first is None else first.place,
    )


def _named(collective: Collective | None) -> str:
    return "calls none" if collective is None else f"calls {collective.text}"


def _some(sites: frozenset[Site]) -> str:
    return " and ".join(sorted(set(map(str, sites)))[:3])


# Values that differ


def _check_values(checked: Program, usual: Outcome, other: Outcome, factor: float | None) -> None:
    __tracebackhide__ = True
    paths = _differing(usual.values, other.values)
    if not paths:
        return
    path, more = paths[0], len(paths) - 1
    causes = _causes(checked, usual, path, factor)
    found = _origin(checked, usual, causes, path, factor)
    also = f" (and {counted(more, 'leaf')} more)" if more else ""
    through = "" if found is None else f" through\n  {found.source}      {found.place}\n"
    raise ReplicationError(
        f"{path}{also} differs between ranks: it depends on {_texts(causes)}{through or ' '}"
        f"and no collective makes it equal; {_way_out(checked, causes, found, path)}",
        path=path,
        line="" if found is None else found.place,
    )


def _differing(values: dict[str, Any], others: dict[str, Any]) -> list[str]:
    paths = [*values, *(path for path in others if path not in values)]
    found = [p for p in paths if not is_same(values.get(p), others.get(p))]
    return sorted(found, key=lambda path: not path.startswith("result"))


def _causes(checked: Program, usual: Outcome, path: str, factor: float | None) -> list[str]:
    """Causes that alone make a value differ; none if it differs without any."""

    def differs(*causes: str) -> bool:
        run = checked.run(frozenset(causes), earlier=usual.collectives, factor=factor)
        return run.error is None and not is_same(usual.values.get(path), run.values.get(path))

    if differs():
        return []
    inputs = [name for name in checked.varying if differs(name)]
    return inputs or [cause for cause in (RANK, RANDOM) if differs(cause)] or [*checked.varying]


def _origin(
    checked: Program, usual: Outcome, causes: Sequence[str], path: str, factor: float | None
) -> Origin | None:
    runs = []
    for others in (frozenset[str](), frozenset(causes)):
        lines = Lines()
        checked.run(others, earlier=usual.collectives, factor=factor, lines=lines)
        runs.append(lines)
    name = path.partition("[")[0]
    usual_lines, other_lines = runs
    wanted = frozenset({name} if name in checked.replicated else ())
    return origin(usual_lines, other_lines, wanted)


def _texts(causes: Sequence[str]) -> str:
    texts = {
        RANK: "the rank",
        RANDOM: "random numbers without a shared seed",
    }
    named = [texts.get(cause, f"`{cause}`") for cause in causes]
    return " and ".join(named) or "what changes from run to run"


def _way_out(checked: Program, causes: Sequence[str], found: Origin | None, path: str) -> str:
    if not causes:
        return (
            "it does not do the same twice: pass all modules, optimizers and generators that it "
            "writes as replicated or varying"
        )
    if RANDOM in causes:
        return (
            "draw them from a torch.Generator with the same seed on all ranks, made in the step or "
            "passed in replicated=, or write fddp.broadcast(values)"
        )
    for cause in causes:
        if cause in checked.varying and _are_alike(checked.varying[cause], path, checked):
            return f"write {cause} = fddp.broadcast({cause}) before the first step"
    carrier = "" if found is None or path.partition("[")[0] in checked.replicated else found.carrier
    if carrier:
        return f"write {carrier} = fddp.pmean({carrier}), or average by a GradSync"
    return "average the gradients: grads = fddp.pmean(grads), or a step of a GradSync"


def _are_alike(value: Any, path: str, checked: Program) -> bool:
    """Return True if a varying input has a leaf with the path of a result."""
    _, _, leaf = path.partition("[")
    if checked.replicated or callable(value):
        return False
    paths = tree_flatten(value)[1].paths
    return any(path and leaf.endswith(f"{path!r}]") for path in paths)


# Collectives of equal values


def _check_redundant(usual: Outcome, others: Sequence[Outcome]) -> None:
    """Check that no call reduces equal values.

    Args:
        usual: the usual run.
        others: as another rank; and, if there is a second, with NaN as inputs, which reach all that
            depends on them. Values may be equal by accident, such as losses of zero parameters.
    """
    __tracebackhide__ = True
    earlier: list[Collective] = []
    for numbers in _calls(usual.collectives):
        sums = [
            (usual.collectives[n], [run.collectives[n] for run in others])
            for n in numbers
            if is_reduction(usual.collectives[n])
        ]
        if sums and all(_is_redundant(own, theirs, earlier) for own, theirs in sums):
            own = sums[0][0]
            is_sum = "psum of" in own.text or "reduce_scatter of" in own.text
            factor = "the number of ranks" if is_sum else "1, a second mean"
            after = f"; see {earlier[-1].call}" if earlier else ""
            raise ReplicationError(
                f"{own.call} reduces values that are equal on all ranks already: the factor is "
                f"{factor}{after}; remove one of the two",
                line=own.place,
            )
        earlier += [own for own, _ in sums]


def _calls(collectives: Sequence[Collective]) -> list[list[int]]:
    """Positions of the collectives of each call. An operator begins with one that reduces nothing,
    its handshake."""
    groups: list[list[int]] = []
    for number, own in enumerate(collectives):
        continues = number > 0 and own.call == collectives[number - 1].call
        if continues and is_reduction(own):
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups


def _is_redundant(
    own: Collective, others: Sequence[Collective], earlier: Sequence[Collective]
) -> bool:
    if is_whole(own.sent) or not all(is_same(own.sent, other.sent) for other in others):
        return False
    has_spoiled, derivatives = len(others) > 1, len(re.findall(r"\b(?:backward|jvp) of ", own.text))
    # Cotangents of a mean are often equal on all ranks, and those of cotangents are as a rule.
    if has_spoiled and not derivatives:
        return True
    repeats = any(is_same(own.sent, one.result) for one in earlier)
    return repeats and derivatives < 2 and (has_spoiled or own.sent.numel() > 1)


# Results that grow with the number of ranks


def _check_growth(checked: Program, usual: Outcome) -> None:
    """Check that no state grows if more ranks send the same. If the step sends other values
    because it knows of them, that does not count unless the state also grows with sums of ranks
    that it does not know of. Other results may be sums over ranks."""
    __tracebackhide__ = True
    replicated, varying = checked.inputs()
    has_shards = any("reduce_scatter" in own.form for own in usual.collectives)
    if has_shards or any(isinstance(leaf, Generator) for leaf in tree_flatten(varying)[0]):
        return
    on_more = checked._replace(ranks=2 * checked.ranks).run(frozenset())
    if on_more.error is not None:
        return  # the step has a mesh of its own
    inputs = replicated | varying
    state = {_shape(p, leaf) for n, v in inputs.items() for p, leaf in leaves_of(n, v)}
    runs = [on_more]
    if not _sends_the_same(usual, on_more):
        runs.append(checked.run(frozenset(), sums=2))
    found = [
        path
        for path, value in usual.values.items()
        if path.partition("[")[0] in replicated or _shape(path, value) in state
        if all(growth(value, run.values.get(path)) != 1.0 for run in runs)
    ]
    if not found:
        return
    sums = [
        own
        for own, theirs in zip(usual.collectives, on_more.collectives, strict=False)
        if is_reduction(own) and growth(own.result, theirs.result) != 1.0 and "psum of" in own.text
    ]
    operators = (own for own in usual.collectives if is_reduction(own) and "bucket" not in own.text)
    sums = sums or [*operators][:1]
    what = f" through {sums[0].text}" if sums else ""
    raise ReplicationError(
        f"{found[0]} changes with the number of ranks, although all send the same{what}; write "
        f"pmean for psum, or psum for pmean, or divide by group.size or by a sum over ranks",
        path=found[0],
        line=sums[0].place if sums else "",
    )


def _sends_the_same(usual: Outcome, on_more: Outcome) -> bool:
    """Return True if the first reduction is an operator's, of values that do not depend on the
    number of ranks."""
    pairs = zip(usual.collectives, on_more.collectives, strict=False)
    own, theirs = next((pair for pair in pairs if is_reduction(pair[0])), (None, None))
    if own is None or theirs is None or own.text.startswith("bucket"):
        return False
    return is_same(own.sent, theirs.sent)


def _shape(path: str, leaf: Any) -> Any:
    """Shape of a leaf; of one element also the last key of its path."""
    shape = getattr(leaf, "shape", ())
    key = re.search(r"(\w+)'\]$", path)
    return shape if math.prod(shape) > 1 else (shape, key and key[1])


# Buffers


def _warn_of_buffers(usual: Outcome, other: Outcome) -> None:
    paths = _differing(usual.buffers, other.buffers)
    if paths:
        more = f" and {counted(len(paths) - 1, 'other')}" if paths[1:] else ""
        warnings.warn(
            f"buffer {paths[0]}{more} differs between ranks; broadcast the buffers of one rank "
            f"before they are saved or used, or use SyncBatchNorm",
            stacklevel=4,
        )
