"""Trees and their leaves: the only place that takes a tree apart or puts one together.

A tree is whatever optree knows as one: dicts, OrderedDicts, defaultdicts, lists, tuples, named
tuples, deques and nodes registered with it, in each other. Everything else is a leaf, and so is
`None`: the position of a gradient that is not there.

[Note: canonical order]
Leaves are numbered by path, entry by entry: integers first, by value, then strings by code point,
then other keys by the name of their type and their `repr`. So ranks number the same leaves alike,
whatever order their dicts were filled in. optree sorts the keys of dicts, but not those of
OrderedDicts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from operator import itemgetter
from sys import intern
from typing import Any, NamedTuple, TypeVar

import optree
from optree import PyTreeKind, PyTreeSpec

from fddp.errors import TreeMismatchError

Tree = TypeVar("Tree")

_KNOWN_STRUCTURES = 128
_MAX_PATHS_SHOWN = 5


class _Structure(NamedTuple):
    """What all trees of one optree structure have in common; see [Note: canonical order]."""

    paths: tuple[str, ...]  # in canonical order
    positions: tuple[int, ...]  # in canonical order: where each leaf comes in optree's order
    is_sorted: bool  # whether the two orders are the same


@dataclass(frozen=True)
class TreeDef:
    """A tree without its leaves.

    Two are equal if they have the same containers with the same keys, whatever order plain dicts
    were filled in. Equal ones have equal `paths`; equal `paths` do not make equal containers.

    >>> leaves, treedef = flatten({"b": 1, "a": [2, 3]})
    >>> leaves, treedef.paths
    ([2, 3, 1], ('a.0', 'a.1', 'b'))
    >>> treedef.unflatten([20, 30, 10])
    {'b': 10, 'a': [20, 30]}
    """

    _treespec: PyTreeSpec
    _structure: _Structure = field(compare=False, repr=False)

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the leaves, in canonical order; a bare leaf has the empty path."""
        return self._structure.paths

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """The tree of these containers around other leaves, given in canonical order.

        Raises:
            ValueError: there are more or fewer leaves than paths.
        """
        if len(leaves) != len(self.paths):
            raise ValueError(f"got {len(leaves)} leaves for a tree of {len(self.paths)}")
        if self._structure.is_sorted:
            return optree.tree_unflatten(self._treespec, leaves)
        in_place: list[Any] = [None] * len(leaves)
        for position, leaf in zip(self._structure.positions, leaves, strict=True):
            in_place[position] = leaf
        return optree.tree_unflatten(self._treespec, in_place)


def flatten(tree: Any) -> tuple[list[Any], TreeDef]:
    """The leaves of a tree in canonical order, and the tree without them.

    The order is worked out once for each structure. After that a call costs little more than
    optree's own flatten, as it must: it runs on every step.

    Raises:
        TypeError: a key has no text that is the same on every rank.
        ValueError: two leaves have the same path.
    """
    leaves, treespec = optree.tree_flatten(tree, none_is_leaf=True)
    structure = _structure(treespec)
    if not structure.is_sorted:
        leaves = list(itemgetter(*structure.positions)(leaves))
    return leaves, TreeDef(treespec, structure)


def tree_map(fn: Callable[..., Any], tree: Tree, *rest: Any) -> Tree:
    """Apply `fn` to the leaves of `tree`, together with those of the same path in other trees.

    Where a leaf is `None` in any of the trees, the leaf of `tree` stays as it is and `fn` is not
    called: a gradient that is not there leaves its parameter alone.

    Args:
        fn: takes one leaf of `tree` and of each tree in `rest`.
        tree: gives the result its containers.
        rest: trees with the same paths, in whatever containers and order.

    Raises:
        TreeMismatchError: a tree in `rest` has other paths.

    >>> params = {"weight": 1.0, "bias": 2.0}
    >>> tree_map(lambda p, g: p - g, params, {"bias": None, "weight": 0.25})
    {'weight': 0.75, 'bias': 2.0}
    """
    leaves, treedef = flatten(tree)
    others = [
        _leaves_along(treedef.paths, other, f"tree {number} of tree_map")
        for number, other in enumerate(rest, start=2)
    ]
    mapped: Tree = treedef.unflatten(
        [
            row[0] if any(leaf is None for leaf in row) else fn(*row)
            for row in zip(leaves, *others, strict=True)
        ]
    )
    return mapped


def map_leaves(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Apply `fn` to every leaf that is not `None`, in a tree whose leaves need no names.

    Unlike in `tree_map`, any keys will do.

    >>> map_leaves(str, {"loss": 0.5, "note": None})
    {'loss': '0.5', 'note': None}
    """
    return optree.tree_map(fn, tree)


def registration_order(tree: Any, treedef: TreeDef) -> tuple[int, ...]:
    """Canonical leaf indices in the order in which the containers were filled.

    Modules register parameters in about the order in which forward uses them, so gradients arrive
    in about the reverse of this.

    Args:
        tree: any tree.
        treedef: that of this very tree, as `flatten` gives it.

    >>> tree = {"b": 0.0, "a": [0.0, 0.0]}
    >>> registration_order(tree, flatten(tree)[1])
    (2, 0, 1)
    """
    filled: list[int] = []
    _walk_as_filled(tree, treedef._treespec, 0, filled)
    canonical = [0] * len(filled)
    for index, position in enumerate(treedef._structure.positions):
        canonical[position] = index
    return tuple(canonical[position] for position in filled)


def check_paths(treedef: TreeDef, paths: tuple[str, ...], what: str) -> None:
    """Make sure that the leaves of a tree are those of a plan, one by one.

    It runs on every step, so paths are interned here and in plans: when all is well, this compares
    pointers.

    Args:
        treedef: of the tree in question.
        paths: those of the plan, in its order.
        what: names the tree in the error, as `"gradients"`.

    Raises:
        TreeMismatchError: paths are missing or unexpected, or numbered in another order.
    """
    if treedef.paths != paths:
        raise _mismatch(treedef.paths, paths, what)


def _leaves_along(paths: tuple[str, ...], tree: Any, what: str) -> list[Any]:
    leaves, treedef = flatten(tree)
    if treedef.paths == paths:
        return leaves
    by_path = dict(zip(treedef.paths, leaves, strict=True))
    if by_path.keys() != set(paths):
        raise _mismatch(treedef.paths, paths, what)
    return [by_path[path] for path in paths]


def _mismatch(paths: tuple[str, ...], expected: tuple[str, ...], what: str) -> TreeMismatchError:
    known, wanted = set(paths), set(expected)
    if known == wanted:
        path, other = next(pair for pair in zip(paths, expected, strict=True) if pair[0] != pair[1])
        return TreeMismatchError(
            f"{what} has the expected {len(paths)} paths, but in containers that number them in "
            f"another order: {path!r} comes where {other!r} is expected; nest it as the tree that "
            "the plan was made for"
        )
    missing = [path for path in expected if path not in known]
    unexpected = [path for path in paths if path not in wanted]
    return TreeMismatchError(
        f"{what} does not have the expected leaves: it has {len(paths)}, expected are "
        f"{len(expected)}; missing: {_some(missing)}; unexpected: {_some(unexpected)}. "
        "Both trees must have the same paths, with None at a leaf that has no value"
    )


def _some(paths: Sequence[str]) -> str:
    more = len(paths) - _MAX_PATHS_SHOWN
    shown = ", ".join(map(repr, paths[:_MAX_PATHS_SHOWN])) or "none"
    return f"{shown} and {more} more" if more > 0 else shown


@lru_cache(maxsize=_KNOWN_STRUCTURES)
def _structure(treespec: PyTreeSpec) -> _Structure:
    positions, paths = _canonical(treespec, {})
    if len(set(paths)) != len(paths):
        paths = _told_apart(paths, positions, treespec)
    return _Structure(
        paths=tuple(map(intern, paths)),
        positions=tuple(positions),
        is_sorted=positions == list(range(len(positions))),
    )


def _canonical(
    treespec: PyTreeSpec, known: dict[PyTreeSpec, tuple[list[int], list[str]]]
) -> tuple[list[int], list[str]]:
    """optree's position and the path of each leaf, in canonical order.

    Models repeat their layers, so each distinct subtree is worked out once and kept in `known`.
    """
    if treespec.is_leaf():
        return [0], [""]
    entries = _entries(treespec)
    keys = _entry_keys(entries)
    numbers = sorted(range(len(keys)), key=keys.__getitem__)
    if treespec.is_one_level():
        return numbers, [_entry_text(entries[number]) for number in numbers]
    positions: list[int] = []
    paths: list[str] = []
    children = treespec.children()
    firsts = list(accumulate((child.num_leaves for child in children), initial=0))
    for number in numbers:
        child, first, text = children[number], firsts[number], _entry_text(entries[number])
        if child.is_leaf():
            positions.append(first)
            paths.append(text)
            continue
        below = known.get(child)
        if below is None:
            below = known[child] = _canonical(child, known)
        positions += [first + position for position in below[0]]
        paths += [f"{text}.{path}" for path in below[1]]
    return positions, paths


def _walk_as_filled(node: Any, treespec: PyTreeSpec, first: int, filled: list[int]) -> None:
    """Add optree's positions of the leaves under `node` as its containers have them."""
    if treespec.is_leaf():
        filled.append(first)
        return
    order: Sequence[int] = range(treespec.num_children)
    is_sorted_by_optree = treespec.type in (dict, defaultdict)
    if is_sorted_by_optree:
        child_of = dict(zip(treespec.entries(), order, strict=True))
        order = [child_of[key] for key in node]
    if treespec.is_one_level():
        filled.extend([first + child for child in order])
        return
    if is_sorted_by_optree:
        values = node.values()
    else:
        values = optree.tree_flatten_one_level(node, none_is_leaf=True)[0]
    children = treespec.children()
    firsts = list(accumulate((child.num_leaves for child in children), initial=first))
    for child, value in zip(order, values, strict=True):
        _walk_as_filled(value, children[child], firsts[child], filled)


def _entries(treespec: PyTreeSpec) -> Sequence[Any]:
    """What leads to each child; optree has numbers where a named tuple has names."""
    container = treespec.type
    if container is not None and container is not tuple and issubclass(container, tuple):
        if treespec.kind == PyTreeKind.NAMEDTUPLE:
            return optree.namedtuple_fields(container)
        if treespec.kind == PyTreeKind.STRUCTSEQUENCE:
            return optree.structseq_fields(container)
    return treespec.entries()


def _entry_keys(entries: Sequence[Any]) -> Sequence[Any]:
    """What siblings are sorted by; see [Note: canonical order]."""
    if set(map(type, entries)) in ({str}, {int}):
        return entries
    return [
        (0, entry)
        if type(entry) is int
        else (1, entry)
        if type(entry) is str
        else (2, type(entry).__name__, repr(entry))
        for entry in entries
    ]


def _entry_text(entry: object) -> str:
    if type(entry) is str:
        return entry
    text = repr(entry)
    if " at 0x" in text:
        raise TypeError(
            f"the tree has the key {text}, whose text differs from rank to rank, so that leaves "
            "cannot be named by it; use a string or an integer, or give its type a __repr__"
        )
    return text


def _told_apart(paths: list[str], positions: list[int], treespec: PyTreeSpec) -> list[str]:
    """Paths in which clashing ones, as of {"a.b": x, "a": {"b": y}}, are written as code."""
    accessors = optree.treespec_accessors(treespec)
    codes = [accessors[position].codify("") for position in positions]
    counts = Counter(paths)
    mixed = [code if counts[path] > 1 else path for path, code in zip(paths, codes, strict=True)]
    for unique in (mixed, codes):
        if len(set(unique)) == len(unique):
            return unique
    [(path, count)] = Counter(codes).most_common(1)
    raise ValueError(f"{count} leaves have the path {path!r}; rename keys so that paths differ")
