"""`python -m tests.testing.replication.mutants [PATTERN]`: mutants of the loops, and which of them
`check_replication` catches.

The exit status is 1 if fewer than 98 percent are caught, or an original is.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
import textwrap
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

import fddp
from fddp.testing import check_replication
from tests.testing.replication import loops as loops_module
from tests.testing.replication.loops import Loop, loops

LEAST_CAUGHT = 0.98
TREES = (
    *("fddp.pmean", "fddp.psum", "fddp.sync_on_backward", "fddp.broadcast", "sync"),
    *("averager.average", "fddp.jax.pmean"),
)


class Mutant(NamedTuple):
    """A loop with one fault."""

    name: str
    fault: str
    loop: Loop


class Verdict(NamedTuple):
    """What the check said: the text of its error, the line, and its time."""

    text: str
    line: str
    took_s: float
    is_valid: bool


# Replacements, called in the code of mutants


def part(operate: Callable[..., Any], tree: Any, *args: Any, **kwargs: Any) -> Any:
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
    for helper in (part, small, finite, local, again, all_but_one, unsynced, synced)
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
        yield "a leaf left out", f"part({name}, {arguments})"
        if name != "fddp.broadcast":
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
        yield "dropped", arguments
        yield "only on rank 0", f"({whole} if group.rank == 0 else {arguments})"
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
                name = f"{loop.fn.__name__} {number}, line {call.lineno}: {ast.unparse(call.func)}"
                yield Mutant(name, fault, _mutated(loop, text, position, code))


def _mutated(loop: Loop, text: str, position: int, code: str) -> Loop:
    tree = ast.parse(text)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    replaced = ast.parse(code, mode="eval").body

    class Replace(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.AST:
            return replaced if node is calls[position] else self.generic_visit(node)

    lines = ast.unparse(Replace().visit(tree)).splitlines(keepends=True)
    filename = f"/mutants/{loop.fn.__name__}_{position}_{abs(hash(code))}.py"
    linecache.cache[filename] = (sum(map(len, lines)), None, lines, filename)
    namespace = {**vars(loops_module), **HELPERS}
    exec(compile("".join(lines), filename, "exec"), namespace)
    return loop._replace(fn=namespace[loop.fn.__name__])


def judge(loop: Loop) -> Verdict:
    """Check a loop."""
    start_s = time.process_time()  # other programs may run, too
    text, line, is_valid = "", "", True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check_replication(loop.fn, replicated=loop.replicated, varying=loop.varying)
    except fddp.ReplicationError as error:
        text, line = str(error), error.line
    except Exception as error:  # the mutant can't run at all
        text, is_valid = f"{type(error).__name__}: {error}", False
    return Verdict(text, line, time.process_time() - start_s, is_valid)


def main(pattern: str = "") -> int:
    """Judge all, and print what is missed; 1 if that is too much."""
    torch.set_num_threads(1)
    judge(next(loop for loop in loops() if loop.fn.__name__ == "optax_adam"))  # start JAX
    judged = {loop.fn.__name__: judge(loop) for loop in loops() if pattern in loop.fn.__name__}
    alarms = {name: verdict.text for name, verdict in judged.items() if verdict.text}
    found = [(m, judge(m.loop)) for m in mutants() if pattern in m.name]
    runs = [(mutant, verdict) for mutant, verdict in found if verdict.is_valid]
    caught = [(m, v) for m, v in runs if v.text and v.line]
    slowest_s = max(v.took_s for v in (*judged.values(), *(v for _, v in found)))
    for mutant, verdict in found:
        state = "invalid" if not verdict.is_valid else "no line" if verdict.text else "missed"
        if not (verdict.is_valid and verdict.text and verdict.line):
            print(f"{state}: {mutant.name}, {mutant.fault}: {verdict.text[:300]}")
    for name, text in alarms.items():
        print(f"false alarm: {name}: {text[:300]}")
    for fault, count in Counter(mutant.fault for mutant, _ in runs).most_common():
        print(f"{fault:24} {sum(m.fault == fault for m, _ in caught):4} of {count:4}")
    slowest = max(found, key=lambda pair: pair[1].took_s)
    print(f"slowest: {slowest[0].name}, {slowest[0].fault}")
    share = len(caught) / len(runs)
    average_s = sum(verdict.took_s for _, verdict in found) / len(found)
    print(
        f"{len(judged)} originals, {len(alarms)} false alarms; {len(runs)} mutants, {len(caught)} "
        f"caught with a line ({share:.1%}), {len(found) - len(runs)} that can't run; a check took "
        f"{slowest_s:.2f} s of CPU at most, {average_s:.2f} s on the average"
    )
    return int(share < LEAST_CAUGHT or bool(alarms))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
