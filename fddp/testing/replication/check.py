"""`check_replication`: a check that a training step keeps replicas equal."""

from __future__ import annotations

import math
import re
import time
import warnings
from collections.abc import Callable, Sequence
from inspect import isroutine
from typing import Any

from torch.nn import Module

from fddp.errors import ReplicationError
from fddp.extend import Site, counted, entrance, tree_flatten
from fddp.testing.replication.allowed import GROWTH, REPEATS, check_names
from fddp.testing.replication.exchange import exchanged
from fddp.testing.replication.growth import check_growth
from fddp.testing.replication.leaves import input_of
from fddp.testing.replication.limits import Limit
from fddp.testing.replication.lines import Lines, Origin, origin
from fddp.testing.replication.observers import (
    Collective,
    Reads,
    first_difference,
    is_reduction,
    is_sum,
    varying_reads,
)
from fddp.testing.replication.runs import RANDOM, RANK, Outcome, Program, program
from fddp.testing.replication.values import Opaque, is_same, is_whole

_EXTREMES = (math.nan, 1e6, 0.0, 10, 0)  # see `scaled`
_READ_RUNS = 3
_INVALID = "raised only with changed inputs; pass a function of the rank that makes valid ones"


@entrance
def check_replication(
    step: Callable[..., Any],
    *,
    replicated: Sequence[Any] = (),
    varying: Sequence[Any] = (),
    ranks: int = 2,
    allow: Sequence[str] = (),
    limit_s: float = 60.0,
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
            are modules and optimizers alone, or all trees are changed in place. Without replicated
            inputs, all results. Other objects are followed through their attributes.
        varying: inputs that each rank has for itself. Where another rank's are needed, elements are
            put in another order and made smaller, and integers and booleans are drawn from their
            own values; a function is called with the rank instead. Text stays. Growth with the
            number of ranks is not checked if a generator is among them, because noise does not add
            up as values do, nor in steps with shards.
        ranks: number of ranks that the step seems to run on, as large as its meshes require.
        allow: what is meant, as the messages name it: "growth" of state with the number of ranks,
            such as that of an objective that is a sum; "repeats", collectives of equal values; and
            paths of leaves and trees that may differ between ranks, such as "result['residual']".
        limit_s: seconds of CPU time after which a run of the step is an error, as one of a million
            calls of torch is. Runs with extreme inputs end earlier, without an error.

    Raises:
        ReplicationError: a result or state differs between ranks, or can't be compared, or there is
            none; ranks would make different collective calls; a mean is taken of equal values, or a
            sum; a result grows with the number of ranks; a run does not end.
        ValueError: a varying input has a leaf without other values, or an input can't be copied;
            `allow` has an unknown name.
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
    checked = program(step, replicated, varying, ranks, Limit(limit_s))
    checked.check_functions()
    start_s = time.thread_time()
    alone = checked.run(frozenset(), reads=Reads())
    if alone.error is not None:
        raise alone.error
    short = _short(checked.limit, alone, time.thread_time() - start_s)
    check_names(allow, [*alone.values, *alone.parts])
    _check_compared(checked, alone.without(allow))
    usual, other = (outcome.without(allow) for outcome in exchanged(checked, alone))
    read_at = varying_reads(usual.reads, other.reads)
    _check_collectives(usual, other, read_at)
    if isinstance(other.error, ReplicationError):
        raise other.error
    if other.error is not None:
        raise ReplicationError(f"the step {_INVALID}: {other.error!r}") from other.error
    _check_values(checked, usual, other, None)
    _check_parts(checked, usual, other)
    others = [other]
    for factor in _EXTREMES:
        extreme = checked.run(
            frozenset(checked.varying), earlier=usual.collectives, factor=factor, limit=short
        )
        _check_collectives(usual, extreme, read_at)
        if extreme.error is None:
            _check_values(checked, usual, extreme.without(allow), factor)
            others += [extreme] if math.isnan(factor) and checked.varying else []
    if REPEATS not in allow:
        _check_redundant(usual, others)
    for seed in range(_READ_RUNS if read_at else 0):
        misled = checked.run(
            frozenset(), earlier=usual.collectives, reads=Reads(read_at, seed), limit=short
        )
        _check_collectives(usual, misled, read_at)
    if GROWTH not in allow:
        check_growth(checked, alone.without(allow))
    _warn_of_buffers(usual, other)


def _short(limit: Limit, usual: Outcome, took_s: float) -> Limit:
    """Limit of runs whose inputs may make a loop endless. They count up to there."""
    return Limit(min(limit.seconds, 0.5 + 10 * took_s), 1000 + 10 * usual.torch_calls)


# Nothing to compare


def _check_compared(checked: Program, usual: Outcome) -> None:
    __tracebackhide__ = True
    for path, value in usual.values.items():
        if isinstance(value, Opaque):
            raise ReplicationError(
                f"{path} can't be compared: {value.kind} has no attributes and no numbers that "
                f"Python can read. Return tensors or numbers in its place, give the object that "
                f"holds it a `state_dict`, or leave it out",
                path=path,
            )
    if not usual.values and not usual.parts:
        names = " and ".join(f"`{name}`" for name in checked.replicated)
        changed = f" and changes nothing of {names} in place" if names else ""
        raise ReplicationError(
            f"nothing was compared: the step returns no numbers as new state{changed}. Return it, "
            f"first and in the order of replicated=, or change it in place, with a learning rate "
            f"that is not zero"
        )


# Different collectives


def _check_collectives(usual: Outcome, other: Outcome, read_at: frozenset[Site]) -> None:
    __tracebackhide__ = True
    difference = first_difference(usual.collectives, other.collectives)
    if difference is None or (other.error is not None and difference[1] is None):
        return
    one, two = (_named(collective) for collective in difference)
    read = (
        f"This depends on a number that differs between ranks, read at {_some(read_at)}; call it "
        f"on all ranks without a condition, or decide by a number that is equal on all of them, "
        f"such as fddp.pmean(loss)"
        if read_at
        else "This depends on the rank, on values, or on shapes of inputs; call it on all ranks "
        "without a condition"
    )
    first = difference[0] or difference[1]
    raise ReplicationError(
        f"ranks would make different collective calls, and hang or fail: one {one}, where another "
        f"{two}. {read}",
        line="" if first is None else first.called_at,
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
        f"and no collective makes it equal; {_way_out(checked, causes, found, path)}. If it may "
        f"differ, pass allow=[{path!r}]",
        path=path,
        line="" if found is None else found.place,
    )


def _check_parts(checked: Program, usual: Outcome, other: Outcome) -> None:
    """Check that parts of DTensors, which differ between ranks, depend on no other varying input
    than the rank."""
    __tracebackhide__ = True
    if not usual.parts:
        return
    own = checked.run(frozenset({RANK}), earlier=usual.collectives)
    paths = _differing(own.parts, other.parts)
    if paths:
        raise ReplicationError(
            f"{paths[0]}, this rank's part of a DTensor, depends on varying inputs or random "
            f"numbers of this rank alone, and no collective reduced them; average the gradients. "
            f"If it may differ, pass allow=[{paths[0]!r}]",
            path=paths[0],
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
    name = input_of(path)
    wanted = frozenset({name} if name in checked.replicated else ())
    modules = [n for n, v in checked.replicated.items() if isinstance(v, Module)]
    module = name if name in modules else next(iter(modules), "")
    shape = tuple(getattr(usual.values.get(path), "shape", ()))
    usual_lines, other_lines = runs
    return origin(usual_lines, other_lines, wanted, shape, module)


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
    if found is not None and found.remedy:
        return f"{found.remedy}, or average by a GradSync"
    return "average the gradients by fddp.pmean, or by a step of a GradSync"


def _are_alike(value: Any, path: str, checked: Program) -> bool:
    """Return True if a varying input has a leaf with the path of a result."""
    _, _, leaf = path.partition("[")
    if checked.replicated:
        return False
    paths = tree_flatten(value(0) if isroutine(value) else value)[1].paths
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
            adds = is_sum(own.text) or "reduce_scatter of" in own.text
            factor = "the number of ranks" if adds else "1, a second mean"
            after = f"; see {earlier[-1].call}" if earlier else ""
            raise ReplicationError(
                f"{own.call} reduces values that are equal on all ranks already: the factor is "
                f"{factor}{after}; remove one of the two. If it is meant, pass "
                f"allow=[{REPEATS!r}]",
                line=own.called_at,
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
