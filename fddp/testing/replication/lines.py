"""Lines at which local variables became different between two runs."""

from __future__ import annotations

import ast
import linecache
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from fddp.testing.replication.values import digest, shapes_of

_LIBRARIES = tuple(
    f"{folder}/"
    for folder in (
        Path(__file__).parents[2],
        Path(torch.__file__).parent,
        sysconfig.get_paths()["stdlib"],
    )
)
_RESULT = "return"  # no name of a variable


class Event(NamedTuple):
    """A line that has run.

    Attributes:
        frame, parent: numbers of its function call and of the calling one.
        code, line: its place; the line of the definition for the arguments of a call.
        digests: of local variables that it changed.
        shapes: of the leaves of these variables.
    """

    frame: int
    parent: int
    code: CodeType
    line: int
    digests: dict[str, bytes | None]
    shapes: dict[str, frozenset[tuple[int, ...]]]


class Lines:
    """Lines of a function, and of functions of the user that it calls directly, as they run."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._numbers: dict[FrameType, int] = {}
        self._parents: dict[int, int] = {}
        self._last: dict[int, tuple[int, dict[str, bytes | None]]] = {}

    def call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function."""
        self._numbers[sys._getframe()] = -1
        previous = sys.gettrace()
        sys.settrace(self._on_call)
        try:
            return fn(*args, **kwargs)
        finally:
            sys.settrace(previous)
            self._numbers.clear()

    def _on_call(self, frame: FrameType, event: str, arg: Any) -> Any:
        parent = None if frame.f_back is None else self._numbers.get(frame.f_back)
        if parent is None or is_library(frame.f_code.co_filename):
            return None
        number = len(self._parents)
        self._numbers[frame], self._parents[number] = number, parent
        self._last[number] = (frame.f_code.co_firstlineno, {})
        self._note(frame, {})
        return self._on_line

    def _on_line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame in self._numbers and event in ("line", "return"):
            self._note(frame, {_RESULT: digest(arg)} if event == "return" else {})
        return self._on_line

    def _note(self, frame: FrameType, more: dict[str, bytes | None]) -> None:
        number = self._numbers[frame]
        line, before = self._last[number]
        after = {name: digest(value) for name, value in frame.f_locals.items()} | more
        missing = object()
        new = {name: d for name, d in after.items() if before.get(name, missing) != d}
        shapes = {name: shapes_of(frame.f_locals.get(name)) for name in new}
        self.events.append(Event(number, self._parents[number], frame.f_code, line, new, shapes))
        self._last[number] = (frame.f_lineno, after)


class Origin(NamedTuple):
    """A statement at which a value became different.

    Attributes:
        place: file and line.
        source: first line of the statement; "" if it is not known.
        remedy: what to write there; "" if it is not known.
    """

    place: str
    source: str
    remedy: str


class _Step(NamedTuple):
    event: Event
    position: int
    new: frozenset[str]  # variables that became or stayed different by this line
    varying: frozenset[str]  # different before it
    equal: frozenset[str]  # with numbers, and equal before it


def origin(
    lines: Lines, other: Lines, wanted: frozenset[str], shape: tuple[int, ...], module: str
) -> Origin | None:
    """The statement at which different values entered a result.

    Args:
        lines, other: of two runs of a function.
        wanted: local variables of the function that differ in the end; the result if there are
            none.
        shape: of the leaf that differs.
        module: variable of the module that the function trains; "" if there is none.
    """
    steps = list(_compared(lines.events, other.events))
    chain = list(_chain(steps, 0, wanted or frozenset({_RESULT})))
    remedy = _remedy(steps, chain, shape, module)
    found, text = (_entry(steps, chain), "") if remedy is None else remedy
    if found is None:
        return None
    statement = _statement(found.event.code, found.event.line)
    line = found.event.line if statement is None else statement.lineno
    source = linecache.getline(found.event.code.co_filename, line).strip()
    return Origin(f"{found.event.code.co_filename}:{line}", source, text)


def _compared(events: Sequence[Event], others: Sequence[Event]) -> Iterator[_Step]:
    known: dict[int, dict[str, tuple[bytes | None, bytes | None]]] = {}
    for position, (event, other) in enumerate(zip(events, others, strict=False)):
        if (event.frame, event.code, event.line) != (other.frame, other.code, other.line):
            return  # the runs took different ways
        values = known.setdefault(event.frame, {})
        varying = frozenset(name for name, (one, two) in values.items() if one != two)
        equal = frozenset(n for n, (one, two) in values.items() if one == two and one is not None)
        new = set()
        for name in event.digests.keys() | other.digests.keys():
            before = values.get(name, (None, None))
            after = event.digests.get(name, before[0]), other.digests.get(name, before[1])
            values[name] = after
            if after[0] != after[1]:
                new.add(name)
        yield _Step(event, position, frozenset(new), varying, equal)


class _Link(NamedTuple):
    step: _Step
    hit: frozenset[str]  # variables that it made different, and that led to wanted ones
    is_mixed: bool  # it read equal ones, too
    is_return: bool


def _chain(steps: Sequence[_Step], frame: int, wanted: frozenset[str]) -> Iterator[_Link]:
    """Lines of a function call that led to different variables, the last one first."""
    for step in reversed(steps):
        hit = step.new & wanted
        if step.event.frame != frame or not hit or _is_entry(step):
            continue
        statement = _statement(step.event.code, step.event.line)
        stored = frozenset[str]() if statement is None else _names(statement, ast.Store)
        reads = step.varying | step.equal if statement is None else _names(statement, ast.Load)
        yield _Link(step, hit, bool(reads & step.equal), hit == {_RESULT})
        wanted = (wanted - (hit & (stored | {_RESULT}))) | (step.varying & reads)
        if not hit <= stored | {_RESULT}:
            wanted |= step.varying  # a method changed an object


def _remedy(
    steps: Sequence[_Step], chain: Sequence[_Link], shape: tuple[int, ...], module: str
) -> tuple[_Step, str] | None:
    """The first statement of a chain that made gradients, and what to write there. After a call of
    `backward`, gradients are what is taken from the parameters."""
    links = chain[::-1]
    backward = [n for n, link in enumerate(links) if _calls_backward(link.step)]
    start = backward[-1] + 1 if backward else 0
    for link in links[start:]:
        statement = _statement(link.step.event.code, link.step.event.line)
        if statement is None or not (link.is_mixed or backward):
            continue
        if "grad" not in ast.unparse(statement):
            inner = _returned(steps, link.step)
            found = _remedy(steps, inner, shape, "")
            if found is not None:
                return found
        names = _gradients(link, statement, shape)
        named = [name for name in names if "grad" in name]
        calls = [] if named else _gradient_calls(statement, link.step.varying)
        if calls:
            return link.step, f"write fddp.pmean({calls[0]}) for {calls[0]}"
        if len(named or names) == 1:
            name = (named or names)[0]
            return link.step, f"write {name} = fddp.pmean({name}) after it"
    if backward and module:
        loop = f"for p in {module}.parameters(): p.grad = fddp.pmean(p.grad)"
        return links[backward[-1]].step, f"write {loop} after it"
    return None


def _gradients(link: _Link, statement: ast.stmt, shape: tuple[int, ...]) -> list[str]:
    """Variables that a statement made, that are no arguments, and that have a leaf of a shape.
    What a statement changes, as an optimizer changes parameters, is no gradient."""
    code, stored = link.step.event.code, _names(statement, ast.Store)
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return sorted(
        name
        for name in (link.hit & stored) - _names(statement, ast.Load) - {*arguments}
        if shape in link.step.event.shapes.get(name, ())
    )


def _gradient_calls(statement: ast.stmt, varying: frozenset[str]) -> list[str]:
    """Calls among the arguments of another that take gradients of different values, the outermost
    one first."""
    calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
    functions = [call.func for call in calls]
    texts = [
        ast.unparse(call)
        for call in calls[1:]
        if call not in functions
        if varying & {node.id for node in ast.walk(call) if isinstance(node, ast.Name)}
    ]
    return [text for text in texts if "grad" in text]


def _calls_backward(step: _Step) -> bool:
    statement = _statement(step.event.code, step.event.line)
    nodes = () if statement is None else ast.walk(statement)
    return any(isinstance(node, ast.Attribute) and node.attr == "backward" for node in nodes)


def _entry(steps: Sequence[_Step], chain: Sequence[_Link]) -> _Step | None:
    """The earliest line that also read equal variables; else the earliest, or a return."""
    inner = [link for link in chain if not link.is_return]
    mixed = [link for link in inner if link.is_mixed]
    for links in (mixed, inner, list(chain)):
        if links:
            return _within(steps, links[-1].step) or links[-1].step
    return None


def _within(steps: Sequence[_Step], step: _Step) -> _Step | None:
    """The line within a function of the user that the line called, if it returned the values."""
    chain = _returned(steps, step)
    return _entry(steps, chain) if chain else None


def _returned(steps: Sequence[_Step], step: _Step) -> list[_Link]:
    """Lines that led to what a line got from a function of the user; none if it called none."""
    for child in reversed(steps[: step.position]):
        if child.event.frame == step.event.frame:
            return []
        if child.event.parent == step.event.frame and _RESULT in child.new:
            return list(_chain(steps, child.event.frame, frozenset({_RESULT})))
    return []


def _is_entry(step: _Step) -> bool:
    """Return True for the arguments of a call."""
    at_definition = step.event.line == step.event.code.co_firstlineno
    return at_definition and not (step.varying or step.equal)


def _statement(code: CodeType, line: int) -> ast.stmt | None:
    """The innermost statement at a line; of a compound one, the header."""
    found = [
        node for node in _statements(code.co_filename) if node.lineno <= line <= _last_line(node)
    ]
    return max(found, key=lambda node: (node.lineno, node.col_offset), default=None)


@cache
def _statements(filename: str) -> list[ast.stmt]:
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return []
    return [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]


def _last_line(node: ast.stmt) -> int:
    body = getattr(node, "body", None)
    return (node.end_lineno or node.lineno) if not body else max(node.lineno, body[0].lineno - 1)


def _names(statement: ast.stmt, context: type[ast.expr_context]) -> frozenset[str]:
    """Variables that a statement reads or assigns, without its body."""
    parts: list[ast.AST] = [statement]
    if hasattr(statement, "body"):
        fields = ("target", "iter", "test", "items", "subject")
        parts = [part for name in fields for part in _listed(getattr(statement, name, None))]
    nodes = [node for part in parts for node in ast.walk(part)]
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        nodes.append(ast.Name(statement.target.id, ast.Load()))
    return frozenset(
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, context)
    )


def _listed(part: Any) -> list[Any]:
    return [] if part is None else part if isinstance(part, list) else [part]


def is_library(filename: str) -> bool:
    return filename.startswith(("<frozen", *_LIBRARIES)) or "-packages/" in filename
