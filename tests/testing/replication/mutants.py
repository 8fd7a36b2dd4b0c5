"""`python -m tests.testing.replication.mutants [PATTERN]`: verdicts of `check_replication` on the
loops and on mutants of them, beside what each does on two real ranks.

A loop is checked with inputs that are functions of the rank, where it has such, and with plain
values. The exit status is 1 if fewer than 98 percent of the mutants that let replicas part or ranks
hang are caught with plain values, or a correct loop is refused without a documented reason. Mutants
that change results of all ranks alike are counted, too: most are left to `check_equivalence`.
"""

from __future__ import annotations

import ast
import inspect
import io
import linecache
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from typing import Any, NamedTuple

import torch

import fddp
from fddp.testing import check_equivalence, check_replication
from tests.testing.replication.loops import Loop, loops
from tests.testing.replication.loops.inputs import EVEN
from tests.testing.replication.truth import Truth, truth_of

LEAST_CAUGHT = 0.98
TREES = (
    *("fddp.pmean", "fddp.psum", "fddp.sync_on_backward", "fddp.broadcast", "sync"),
    *("averager.average", "averaging.average", "fddp.jax.pmean", "fddp.jax.psum"),
    *("fddp.pmax", "fddp.broadcast_from"),
)
REFUSED = ("doubled", "only for small values", "only for finite values")
"""Faults that the check refuses whatever the results: a second mean, and decisions by numbers of
one rank, which few inputs turn."""
REPEATED = ("fddp.broadcast", "fddp.pmax", "fddp.broadcast_from")
"""Operators that may be called twice."""


class Mutant(NamedTuple):
    """A loop with one fault."""

    name: str
    fault: str
    loop: Loop
    original: Loop


class Verdict(NamedTuple):
    """Verdict of a check: the text of its error, the line, and its time; `is_valid` is False if
    the loop can't run."""

    text: str
    line: str
    took_s: float
    is_valid: bool

    @property
    def is_caught(self) -> bool:
        """True if a loop that can run is refused."""
        return self.is_valid and bool(self.text)


class Judged(NamedTuple):
    """A mutant, what it does on two ranks, and what `check_replication` says with both kinds of
    inputs; and `check_equivalence`, if a wrong one passes that and has to be like one device."""

    mutant: Mutant
    truth: Truth
    by_rank: Verdict
    plain: Verdict
    beside: Verdict | None

    @property
    def is_caught(self) -> bool:
        """True if one of the checks refuses the mutant, with plain values."""
        return self.plain.is_caught or (self.beside is not None and self.beside.is_caught)

    @property
    def is_refused(self) -> bool:
        """True if the check refuses a mutant that is harmless, without a documented reason."""
        is_documented = self.mutant.fault in REFUSED or bool(self.mutant.original.alarm)
        return self.truth.verdict == "same" and self.plain.is_caught and not is_documented


# Replacements, called in the code of mutants


def most_of(operate: Callable[..., Any], tree: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of an operator with one leaf left out."""
    done = operate(tree, *args, **kwargs)
    names = iter([True])
    return fddp.tree_map(lambda new, old: old if next(names, False) else new, done, tree)


def small(tree: Any) -> bool:
    """A decision by the values of a tree."""
    leaves = fddp.extend.tree_flatten(tree)[0]
    return bool(sum(abs(leaf).sum().item() for leaf in leaves) < 1e4)


def finite(tree: Any) -> bool:
    """A decision by whether all values are finite."""
    leaves = fddp.extend.tree_flatten(tree)[0]
    return all(bool((abs(leaf) < 1e30).all()) for leaf in leaves)


def local(sync: Any, fn: Callable[..., Any], **_: Any) -> Callable[..., Any]:
    """A step that does not average."""

    def step(params: Any, *args: Any, hook_state: Any = None, **_: Any) -> tuple[Any, ...]:
        grads, loss = torch.func.grad_and_value(fn)(params, *args)
        return (loss, grads) if hook_state is None else (loss, grads, hook_state)

    return step


def again(sync: Any, fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A step that averages twice."""
    own = sync.value_and_grad(fn, **options)

    def step(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        loss, grads, *more = own(*args, **kwargs)
        return (loss, fddp.pmean(grads), *more)

    return step


def all_but_one(params: Any, **options: Any) -> Any:
    """A `GradSync` that leaves one leaf out."""
    paths = fddp.plan_buckets(params).paths
    return fddp.GradSync(params, select=lambda path: path != paths[0], **options)


class Transform(NamedTuple):
    """A transformation of optax or torchopt."""

    init: Callable[..., Any]
    update: Callable[..., Any]


def unsynced(transform: Any) -> Any:
    """A transformation that does nothing."""
    return Transform(transform.init, lambda updates, state, *_, **__: (updates, state))


def synced(transform: Any, library: Any) -> Any:
    """A transformation that averages once more."""
    return library.chain(transform, fddp.as_transform(fddp.pmean))


HELPERS = {
    helper.__name__: helper
    for helper in (most_of, small, finite, local, again, all_but_one, unsynced, synced)
}


def replacements(call: ast.Call, library: str) -> Iterator[tuple[str, str]]:
    """Names of faults, and the code that each puts in the place of a call."""
    name, whole = ast.unparse(call.func), ast.unparse(call)
    rest = "".join(f", {ast.unparse(part)}" for part in (*call.args[1:], *call.keywords))
    arguments = ", ".join(ast.unparse(part) for part in (*call.args, *call.keywords))
    if name in TREES and "with_info" not in arguments:
        tree = ast.unparse(call.args[0])
        yield "dropped", tree
        yield "only on rank 0", f"({whole} if group.rank == 0 else {tree})"
        if name != "fddp.sync_on_backward":  # of parameters, which are equal on all ranks
            yield "only for small values", f"({whole} if small({tree}) else {tree})"
            yield "only for finite values", f"({whole} if finite({tree}) else {tree})"
        yield "a leaf left out", f"most_of({name}, {arguments})"
        if name not in REPEATED:
            yield "doubled", f"{name}({whole}{rest})"
        for one, other in (("pmean", "psum"), ("psum", "pmean")):
            if name == f"fddp.{one}":
                yield f"{other} for {one}", f"fddp.{other}({arguments})"
    elif name == "sync.value_and_grad":
        yield "dropped", f"local(sync, {arguments})"
        yield "doubled", f"again(sync, {arguments})"
        chosen = f"({whole} if group.rank == 0 else local(sync, {arguments}))"
        yield "only on rank 0", chosen
    elif name == "fddp.GradSync":
        yield "a leaf left out", f"all_but_one({arguments})"
    elif name == "fddp.DistributedDataParallel":
        module = ast.unparse(call.args[0])
        yield "dropped", module
        yield "only on rank 0", f"({whole} if group.rank == 0 else {module})"
    elif name == "ddp":
        yield "around the wrapper", f"ddp.module({arguments})"
    elif name == "fddp.as_transform":
        yield "dropped", f"unsynced({whole})"
        yield "doubled", f"synced({whole}, {library})"


def mutants() -> Iterator[Mutant]:
    """All mutants of all loops, with inputs of their own."""
    for number, loop in enumerate(loops()):
        text = textwrap.dedent(inspect.getsource(loop.fn))
        calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
        for position, call in enumerate(calls):
            library = "optax" if "optax" in text else "torchopt"
            for fault, code in replacements(call, library):
                name = f"{loop} {number}, line {call.lineno}: {ast.unparse(call.func)}"
                yield Mutant(name, fault, _mutated(loop, text, position, code), loop)


def _mutated(loop: Loop, text: str, position: int, code: str) -> Loop:
    tree = ast.parse(text)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    replaced = ast.parse(code, mode="eval").body

    class Replace(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.AST:
            return replaced if node is calls[position] else self.generic_visit(node)

    changed = Replace().visit(tree)
    takes = changed.body[0].args.args
    if "group" in code and all(argument.arg != "group" for argument in takes):
        takes.append(ast.arg("group"))
    lines = ast.unparse(changed).splitlines(keepends=True)
    filename = f"/mutants/{loop.fn.__name__}_{position}_{abs(hash(code))}.py"
    linecache.cache[filename] = (sum(map(len, lines)), None, lines, filename)
    around = inspect.getclosurevars(loop.fn).nonlocals
    namespace = {**loop.fn.__globals__, **around, **HELPERS}
    exec(compile("".join(lines), filename, "exec"), namespace)
    return loop._replace(fn=namespace[loop.fn.__name__])


def with_plain_values(loop: Loop) -> Loop:
    """A loop whose varying inputs are those of rank 0, and no functions."""
    values = (value(0) if inspect.isroutine(value) else value for value in loop.varying)
    return loop._replace(varying=tuple(values))


def judge(loop: Loop) -> Verdict:
    """Check a loop."""
    start_s = time.process_time()  # other programs may run, too
    text, line, is_valid = "", "", True
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            check_replication(loop.fn, replicated=loop.replicated, varying=loop.varying)
    except fddp.ReplicationError as error:
        text, line = str(error), error.line
    except Exception as error:  # the mutant can't run at all
        text, is_valid = f"{type(error).__name__}: {error}", False
    return Verdict(text, line, time.process_time() - start_s, is_valid)


def judge_beside(loop: Loop) -> Verdict | None:
    """Compare a loop with one device; None if there is a reason why ranks are not like one."""
    is_even = loop.unlike in EVEN
    if loop.is_forward or (loop.unlike and not is_even):
        return None
    start_s, text, is_valid = time.process_time(), "", True
    batch = with_plain_values(loop).varying
    parts = ((1, 1),) if is_even else ((3, 5), (1, 2, 5))
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            check_equivalence(loop.fn, loop.replicated, batch, parts=parts)
    except fddp.EquivalenceError as error:
        text = str(error)
    except Exception as error:  # the mutant can't run at all
        text, is_valid = f"{type(error).__name__}: {error}", False
    return Verdict(text, "", time.process_time() - start_s, is_valid)


def judged(mutant: Mutant) -> Judged:
    """Run a mutant on two ranks, and check it."""
    is_plain = not any(map(inspect.isroutine, mutant.loop.varying))
    by_rank = judge(mutant.loop)
    plain = by_rank if is_plain else judge(with_plain_values(mutant.loop))
    truth = truth_of(mutant.loop, mutant.original)
    asks = truth.is_wrong and not plain.is_caught
    beside = judge_beside(mutant.loop) if asks else None
    return Judged(mutant, truth, by_rank, plain, beside)


def main(pattern: str = "") -> int:
    """Judge all, and print verdicts that are wrong; 1 if there are too many."""
    torch.set_num_threads(1)
    failures = 0
    for loop in loops():
        if pattern in str(loop):
            text, truth = judge(loop).text, truth_of(loop)
            failures += truth.verdict not in ("same", "unknown") or bool(text and not loop.alarm)
            if text or truth.verdict != "same":
                known = f" (documented: {loop.alarm})" if loop.alarm else ""
                print(f"original: {loop}: {truth} {text[:300]}{known}", flush=True)
    found = []
    for mutant in mutants():
        if pattern in mutant.name:
            found.append(judged(mutant))
            print_if_wrong(found[-1])
    print_table(found)
    wrong = [one for one in found if one.truth.is_wrong]
    caught = sum(one.is_caught for one in wrong)
    print(f"one of the two checks refuses {caught} of {len(wrong)} wrong ones, with plain values")
    return int(failures > 0 or caught < LEAST_CAUGHT * len(wrong))


def print_if_wrong(one: Judged) -> None:
    """Print a mutant that is missed, or refused without need."""
    text = f"{one.mutant.name}, {one.mutant.fault}: {one.truth.verdict} {one.truth.where}"
    if one.truth.is_wrong and not one.plain.is_valid:
        print(f"not checked: {text}: {one.plain.text[:200]}", flush=True)
    elif one.truth.is_wrong and not one.is_caught:
        state = "by functions of the rank alone" if one.by_rank.is_caught else "by no check"
        unlike = one.mutant.original.unlike
        print(f"caught {state}: {text}" + (f" ({unlike})" if unlike else ""), flush=True)
    elif one.plain.is_caught and one.truth.is_wrong and not one.plain.line:
        print(f"without a line: {text}: {one.plain.text[:200]}", flush=True)
    elif one.is_refused:
        print(f"refused: {text}: {one.plain.text[:200]}", flush=True)


def print_table(found: list[Judged]) -> None:
    """Print how many are caught, by what they do and by the fault."""
    print(f"{'':24} {'mutants':>8} {'caught':>7} {'with plain values':>18} {'by either':>10}")
    for verdict in ("parts", "hangs", "changes", "same", "raises", "unknown"):
        _print_row(verdict, [one for one in found if one.truth.verdict == verdict])
    for fault in dict.fromkeys(one.mutant.fault for one in found):
        _print_row(fault, [o for o in found if o.mutant.fault == fault and o.truth.is_wrong])
    slowest = max(found, key=lambda one: one.by_rank.took_s)
    print(
        f"{len(found)} mutants, {sum(one.is_refused for one in found)} harmless ones refused; "
        f"slowest check {slowest.by_rank.took_s:.1f} s of CPU: {slowest.mutant.name}"
    )


def _print_row(title: str, found: list[Judged]) -> None:
    caught = sum(one.by_rank.is_caught for one in found)
    plain, either = (sum(o.plain.is_caught for o in found), sum(o.is_caught for o in found))
    print(f"{title:24} {len(found):8} {caught:7} {plain:18} {either:10}")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
