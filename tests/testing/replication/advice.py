"""`python -m tests.testing.replication.advice [PATTERN] [EVERY]`: advice of `check_replication`,
followed.

A program does to the source of each mutant what the message says, at the line that it names, and
checks the step again, until it passes or the message names nothing that the program can write. The
exit status is 1 if fewer than 95 percent of those whose advice it could follow pass.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import re
import sys
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.testing.replication import mutants as mutants_module
from tests.testing.replication.loops import Loop

LEAST_RIGHT = 0.95
ROUNDS = 3
_NUMBERS = count()

# Helpers of mutants stand for parts of libraries: advice is about the lines of the loops.
library: dict[str, Any] = {"__name__": "mutants_of_a_library"}
exec(
    compile(inspect.getsource(mutants_module), f"{Path(torch.__file__).parent}/mutants.py", "exec"),
    library,
)


class Trial(NamedTuple):
    """A step whose advice was followed.

    Attributes:
        name: of the mutant, with its fault.
        advice: messages, in order, up to the first that could not be followed.
        passes: True if the step passes at last.
        is_followed: False if the first message named nothing to write.
    """

    name: str
    advice: list[str]
    passes: bool
    is_followed: bool


def follow(loop: Loop, text: str, line: str) -> Loop | None:
    """The loop after what a message says was done to its source; None if that is not possible."""
    filename = loop.fn.__code__.co_filename
    own, _, number = line.rpartition(":")
    if own != filename and "before the first step" not in text:
        return None
    tree = ast.parse("".join(linecache.getlines(filename)))
    if not _edit(tree, text, int(number)):
        return None
    lines = ast.unparse(ast.fix_missing_locations(tree)).splitlines(keepends=True)
    new = f"/followed/{loop.fn.__name__}_{next(_NUMBERS)}.py"
    linecache.cache[new] = (sum(map(len, lines)), None, lines, new)
    namespace = dict(loop.fn.__globals__)
    exec(compile("".join(lines), new, "exec"), namespace)
    return loop._replace(fn=namespace[loop.fn.__name__])


def _edit(tree: ast.Module, text: str, line: int) -> bool:
    """Do what a message says."""
    if found := re.search(r"write ([^;]+?) before the first step", text):
        function = tree.body[0]
        assert isinstance(function, ast.FunctionDef)
        function.body[:0] = ast.parse(found[1]).body
        return True
    if found := re.search(r"write (.+?) after it", text):
        return _insert(tree, ast.parse(found[1]).body, line)
    if found := re.search(r"write fddp.pmean\((.+)\) for \1", text):
        return _replace_calls(tree, line, lambda call: ast.unparse(call) == found[1], "pmean")
    if "remove one of the two" in text:
        return _replace_calls(tree, line, _reduces, "")
    if found := re.search(r"write (\w+) for (\w+) there", text):
        old = f".{found[2]}"
        return _replace_calls(
            tree, line, lambda call: ast.unparse(call.func).endswith(old), found[1], inside=True
        )
    return "without a condition" in text and _without_condition(tree, line)


def _statements(tree: ast.AST, line: int) -> list[tuple[list[ast.stmt], int]]:
    """Lists of statements, and places in them, that have a line; the innermost one last."""
    found = []
    for node in ast.walk(tree):
        for _, body in ast.iter_fields(node):
            if isinstance(body, list):
                for place, part in enumerate(body):
                    if isinstance(part, ast.stmt) and part.lineno <= line <= (part.end_lineno or 0):
                        found.append((body, place))
    return found


def _insert(tree: ast.Module, new: list[ast.stmt], line: int) -> bool:
    *_, (body, place) = _statements(tree, line)
    body[place + 1 : place + 1] = new
    return not isinstance(body[place], ast.Return)


def _reduces(call: ast.Call) -> bool:
    names = r"(pmean|psum|sync|sync_on_backward)$"
    operator = call.args[0] if ast.unparse(call.func) == "most_of" else call.func
    return bool(re.search(names, ast.unparse(operator)))


def _replace_calls(
    tree: ast.Module, line: int, wanted: Any, name: str, inside: bool = False
) -> bool:
    """Replace the first call at a line that is wanted: by its argument, by a call of it, or by one
    of the operator `name`."""
    *_, (body, place) = _statements(tree, line)
    calls = [n for n in ast.walk(body[place]) if isinstance(n, ast.Call) and wanted(n)]
    if not calls:
        return False

    class Replace(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.AST:
            if node is not calls[0]:
                return self.generic_visit(node)
            if inside:
                assert isinstance(node.func, ast.Attribute)
                node.func.attr = name
                return node
            if not name:
                return node.args[1 if ast.unparse(node.func) == "most_of" else 0]
            return ast.Call(ast.parse(f"fddp.{name}", mode="eval").body, [node], [])

    body[place] = Replace().visit(body[place])
    return True


def _without_condition(tree: ast.Module, line: int) -> bool:
    """Replace conditional expressions at a line by what they call on some ranks; if there are none,
    those of the function, which chose what the line calls."""
    *_, (body, place) = _statements(tree, line)

    class Replace(ast.NodeTransformer):
        count = 0

        def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
            self.count += 1
            return node.body

    replace = Replace()
    body[place] = replace.visit(body[place])
    if not replace.count:
        replace.visit(tree)
    return replace.count > 0


def try_advice(name: str, loop: Loop) -> Trial | None:
    """Follow the advice about a loop; None if it passes or can't run."""
    verdict, advice = mutants_module.judge(loop), []
    if not verdict.is_valid or not verdict.text:
        return None
    for _ in range(ROUNDS):
        advice.append(f"{verdict.line}: {verdict.text}")
        new = follow(loop, verdict.text, verdict.line)
        if new is None:
            return Trial(name, advice, False, len(advice) > 1)
        loop = new
        verdict = mutants_module.judge(loop)
        if not verdict.text:
            return Trial(name, advice, True, True)
    return Trial(name, [*advice, verdict.text], False, True)


def trials(pattern: str = "", every: int = 1) -> list[Trial]:
    """Trials of mutants."""
    chosen = (m for m in library["mutants"]() if pattern in f"{m.name}, {m.fault}")
    found = [try_advice(f"{m.name}, {m.fault}", m.loop) for m in islice(chosen, 0, None, every)]
    return [trial for trial in found if trial is not None]


def main(pattern: str = "", every: str = "1") -> int:
    """Follow all advice, and print what does not help."""
    torch.set_num_threads(1)
    found = trials(pattern, int(every))
    for trial in found:
        if not trial.passes:
            state = "does not pass" if trial.is_followed else "not followed"
            print(f"{state}: {trial.name}:", *(f"\n    {a[:600]}" for a in trial.advice))
    followed = [trial for trial in found if trial.is_followed]
    right = sum(trial.passes for trial in found)
    share, all_share = right / max(len(followed), 1), right / max(len(found), 1)
    print(
        f"{len(found)} messages, {len(followed)} could be followed, after which {right} pass: "
        f"{share:.1%} of those, {all_share:.1%} of all"
    )
    return int(share < LEAST_RIGHT)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
