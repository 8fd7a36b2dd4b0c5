"""Flattening and unflattening of pytrees. No other module does either.

A tree is whatever optree accepts: nested dicts, OrderedDicts, defaultdicts, lists, tuples, named
tuples, deques and registered nodes; and, if JAX is imported, containers registered with
`jax.tree_util`. Everything else is a leaf. So is `None`, which marks a missing gradient.

[Note: canonical order]
Leaves are numbered by path, entry by entry: integers first, by value, then strings by code point,
then other keys by the name of their type and their `repr`. All ranks therefore number the same
leaves alike, in whatever order their dicts were filled. optree sorts the keys of dicts, but not
those of OrderedDicts.

[Note: trees in graphs]
Under dynamo, optree's functions are replaced by slow Python versions of torch's, and caches are not
traced. There the entries that lead to each leaf are listed, by `traced.py` if it knows the
containers, and a function that dynamo calls instead of tracing derives the order from them, once
per graph.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from operator import itemgetter
from sys import intern
from threading import Lock
from typing import Any, NamedTuple, TypeVar

import optree
import torch
from optree import PyTreeKind, PyTreeSpec

from fddp.core.entrance import entrance
from fddp.errors import TreeMismatchError
from fddp.tree.traced import rebuilt, walk

Tree = TypeVar("Tree")

_KNOWN_STRUCTURES = 128
_MAX_PATHS_SHOWN = 5
_NAMESPACE = "fddp"  # optree namespace of containers registered with JAX

_learned: set[type] = set()
_learning = Lock()


class _Structure(NamedTuple):
    """Properties shared by all trees of one optree structure; see [Note: canonical order]."""

    paths: tuple[str, ...]  # in canonical order
    positions: tuple[int, ...]  # for each leaf in canonical order, its position in optree's
    is_sorted: bool  # True if the two orders are equal


@dataclass(frozen=True)
class TreeDef:
    """Structure of a tree.

    Two are equal if they have the same containers with the same keys, in whatever order plain dicts
    were filled. Equal structures have equal `paths`; the converse does not hold.

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
        """Paths of the leaves, in canonical order. A bare leaf has the empty path."""
        return self._structure.paths

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """Build the tree around other leaves, in canonical order.

        Raises:
            ValueError: the number of leaves is wrong.
        """
        if len(leaves) != len(self.paths):
            raise ValueError(f"got {len(leaves)} leaves for a tree of {len(self.paths)}")
        if self._structure.is_sorted:
            return self._treespec.unflatten(leaves)
        in_place: list[Any] = [None] * len(leaves)
        for position, leaf in zip(self._structure.positions, leaves, strict=True):
            in_place[position] = leaf
        return self._treespec.unflatten(in_place)


def flatten(tree: Any) -> tuple[list[Any], TreeDef]:
    """Return the leaves of a tree in canonical order, and its structure.

    The order is computed once per structure; after that a call costs little more than optree's own
    flatten.

    Raises:
        TypeError: the text of a key differs between ranks.
        ValueError: two leaves have the same path.
    """
    if torch.compiler.is_dynamo_compiling():
        return _traced(tree)
    leaves, treespec = optree.tree_flatten(tree, none_is_leaf=True)
    if "jax.tree_util" in sys.modules:
        while _learn_nodes(leaves):  # whose children may be further nodes
            leaves, treespec = optree.tree_flatten(tree, none_is_leaf=True, namespace=_NAMESPACE)
    structure = _structure(treespec)
    if not structure.is_sorted:
        leaves = list(itemgetter(*structure.positions)(leaves))
    return leaves, TreeDef(treespec, structure)


def _learn_nodes(leaves: Sequence[Any]) -> bool:
    """Register the containers of JAX among optree's leaves, hidden from other users of optree by
    their namespace, and return True if there are any."""
    by_type = dict(zip(map(type, leaves), leaves, strict=True))
    nodes = [kind for kind, leaf in by_type.items() if _is_jax_node(leaf)]
    with _learning:
        for kind in nodes:
            if kind not in _learned:
                optree.register_pytree_node(
                    kind, _flatten_jax_node, _unflatten_jax_node, namespace=_NAMESPACE
                )
                _learned.add(kind)
    return bool(nodes)


def _is_jax_node(value: Any) -> bool:
    """Return True if JAX treats a value as a container. `None` is a leaf here.

    >>> _is_jax_node(0.5)
    False
    """
    # JAX is never imported: unless it already is, nothing can be registered with it.
    tree_util = sys.modules.get("jax.tree_util")
    return tree_util is not None and value is not None and not tree_util.all_leaves([value])


def _flatten_jax_node(node: Any) -> tuple[tuple[Any, ...], Any, tuple[Any, ...]]:
    """Return the children of a container, its structure, and the entry of each child."""
    tree_util = sys.modules["jax.tree_util"]
    pairs, treedef = tree_util.tree_flatten_with_path(node, is_leaf=lambda inner: inner is not node)
    entries = tuple(_jax_entry(path) for path, _ in pairs)
    return tuple(child for _, child in pairs), treedef, entries


def _unflatten_jax_node(treedef: Any, children: Any) -> Any:
    return treedef.unflatten(children)


def _jax_entry(path: tuple[Any, ...]) -> Any:
    """Return the user's name for a child: an attribute, a key or an index."""
    (key,) = path
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return str(key)


@entrance
def tree_map(fn: Callable[..., Any], tree: Tree, *rest: Any) -> Tree:
    """Apply `fn` to the leaves of `tree` and the leaves of the same path in other trees.

    If a leaf is `None` in any of the trees, the leaf of `tree` is returned unchanged and `fn` is
    not called, so a parameter without a gradient is kept.

    Args:
        fn: function of one leaf of `tree` and of each tree in `rest`.
        tree: tree with the containers of the result.
        rest: trees with the same paths, in any containers and order.

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
    """Apply `fn` to every leaf that is not `None`. Unlike in `tree_map`, any keys are allowed.

    >>> map_leaves(str, {"loss": 0.5, "note": None})
    {'loss': '0.5', 'note': None}
    """
    return optree.tree_map(fn, tree)


def insertion_order(tree: Any, treedef: TreeDef) -> tuple[int, ...]:
    """Return canonical leaf indices in the insertion order of the containers.

    Modules register parameters roughly in the order of use in forward, so gradients arrive roughly
    in the reverse of this order. `treedef` must be that of `tree`.

    >>> tree = {"b": 0.0, "a": [0.0, 0.0]}
    >>> insertion_order(tree, flatten(tree)[1])
    (2, 0, 1)
    """
    filled: list[int] = []
    _walk_as_filled(tree, treedef._treespec, 0, filled)
    if treedef._structure.is_sorted:
        return tuple(filled)
    canonical = [0] * len(filled)
    for index, position in enumerate(treedef._structure.positions):
        canonical[position] = index
    return tuple(canonical[position] for position in filled)


def check_paths(treedef: TreeDef, paths: tuple[str, ...], what: str) -> None:
    """Check that the leaves of a tree, named `what` in the error, have the paths of a plan, in
    order.

    Paths are interned here and in plans, so in the usual case this compares pointers.

    Raises:
        TreeMismatchError: paths are missing, unexpected or in another order.
    """
    if treedef.paths != paths:
        raise mismatch(treedef.paths, paths, what)


def _leaves_along(paths: tuple[str, ...], tree: Any, what: str) -> list[Any]:
    leaves, treedef = flatten(tree)
    if treedef.paths == paths:
        return leaves
    by_path = dict(zip(treedef.paths, leaves, strict=True))
    if by_path.keys() != set(paths):
        raise mismatch(treedef.paths, paths, what)
    return [by_path[path] for path in paths]


def mismatch(paths: tuple[str, ...], expected: tuple[str, ...], what: str) -> TreeMismatchError:
    """Error of a tree, named `what`, that has other paths than expected."""
    known, wanted = set(paths), set(expected)
    if known == wanted:
        path, other = next(pair for pair in zip(paths, expected, strict=True) if pair[0] != pair[1])
        return TreeMismatchError(
            f"{what} has the expected {len(paths)} paths, but its containers number them in "
            f"another order: {path!r} comes where {other!r} is expected; nest it like the tree "
            "that the plan was made for"
        )
    advice = "Both trees must have the same paths, with None at a leaf that has no value"
    if paths == ("",):
        advice = "For a module, pass the tensors by name: dict(module.named_parameters())"
    missing = [path for path in expected if path not in known]
    unexpected = [path for path in paths if path not in wanted]
    return TreeMismatchError(
        f"{what} does not have the expected leaves: it has {len(paths)}, expected "
        f"{len(expected)}; missing: {_some(missing)}; unexpected: {_some(unexpected)}. "
        f"{advice}"
    )


def _some(paths: Sequence[str]) -> str:
    more = len(paths) - _MAX_PATHS_SHOWN
    shown = ", ".join(map(repr, paths[:_MAX_PATHS_SHOWN])) or "none"
    return f"{shown} and {more} more" if more > 0 else shown


@lru_cache(maxsize=_KNOWN_STRUCTURES)
def _structure(treespec: PyTreeSpec) -> _Structure:
    positions, paths = _canonical(treespec, {})
    if len(set(paths)) != len(paths):
        accessors = optree.treespec_accessors(treespec)
        codes = [accessors[position].codify("") for position in positions]
        paths = _disambiguated(paths, codes)
    return _Structure(
        paths=tuple(map(intern, paths)),
        positions=tuple(positions),
        is_sorted=positions == list(range(len(positions))),
    )


@dataclass(frozen=True)
class _Example:
    """Tree flattened by `traced.py`, in place of its structure."""

    tree: Any = field(compare=False, repr=False)

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        return rebuilt(self.tree, iter(leaves))


def _traced(tree: Any) -> tuple[list[Any], TreeDef]:
    """Implement `flatten` under dynamo; see [Note: trees in graphs]."""
    leaves: list[Any] = []
    ways: list[tuple[Any, ...]] = []
    is_known = walk(tree, leaves, ways)
    structure = _structure_of_ways(tuple(ways), None) if is_known else None
    treespec: Any = _Example(tree)
    if structure is None:
        leaves, treespec = optree.tree_flatten(tree, none_is_leaf=True)
        ways = []
        codes: list[str] = []
        _list_ways(treespec, (), "", ways, codes)
        structure = _structure_of_ways(tuple(ways), tuple(codes))
        assert structure is not None  # with codes it never is
    in_order = [leaves[position] for position in structure.positions]
    return in_order, TreeDef(treespec, structure)


def _list_ways(
    treespec: PyTreeSpec, way: tuple[Any, ...], code: str, ways: list[Any], codes: list[str]
) -> None:
    """List the entries that lead to each leaf, and the same as code, in optree's order."""
    if treespec.is_leaf():
        ways.append(way)
        codes.append(code)
        return
    container = treespec.type
    fields: Sequence[str] = ()
    if container is not None and container is not tuple and issubclass(container, tuple):
        fields = optree.namedtuple_fields(container)
    for number, child in enumerate(treespec.children()):
        entry = fields[number] if fields else treespec.entry(number)
        step = f".{entry}" if fields else f"[{entry!r}]"
        _list_ways(child, (*way, entry), code + step, ways, codes)


def _structure_of_ways(
    ways: tuple[tuple[Any, ...], ...], codes: tuple[str, ...] | None
) -> _Structure | None:
    """Implement `_structure` on constants. Return None if clashing paths cannot be resolved."""
    keys = [[_mixed_key(entry) for entry in way] for way in ways]
    positions = sorted(range(len(ways)), key=keys.__getitem__)
    paths = [".".join(map(_entry_text, ways[position])) for position in positions]
    if len(set(paths)) != len(paths):
        if codes is None:
            return None
        paths = _disambiguated(paths, [codes[position] for position in positions])
    return _Structure(tuple(map(intern, paths)), tuple(positions), positions == [*range(len(ways))])


# Equivalent to `torch._dynamo.assume_constant_result`, without importing dynamo.
_structure_of_ways._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _canonical(
    treespec: PyTreeSpec, known: dict[PyTreeSpec, tuple[list[int], list[str]]]
) -> tuple[list[int], list[str]]:
    """Return optree's position and the path of each leaf, in canonical order.

    Models repeat layers, so each distinct subtree is computed once and cached in `known`.
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
    """Append optree's positions of the leaves under `node` in insertion order."""
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
        values = optree.tree_flatten_one_level(
            node, none_is_leaf=True, namespace=treespec.namespace
        )[0]
    children = treespec.children()
    firsts = list(accumulate((child.num_leaves for child in children), initial=first))
    for child, value in zip(order, values, strict=True):
        _walk_as_filled(value, children[child], firsts[child], filled)


def _entries(treespec: PyTreeSpec) -> Sequence[Any]:
    """Return the entry of each child. optree numbers fields of named tuples; return their names."""
    container = treespec.type
    if container is not None and container is not tuple and issubclass(container, tuple):
        if treespec.kind == PyTreeKind.NAMEDTUPLE:
            return optree.namedtuple_fields(container)
        if treespec.kind == PyTreeKind.STRUCTSEQUENCE:
            return optree.structseq_fields(container)
    return treespec.entries()


def _entry_keys(entries: Sequence[Any]) -> Sequence[Any]:
    """Return the sort keys of siblings; see [Note: canonical order]."""
    if set(map(type, entries)) in ({str}, {int}):
        return entries
    return [_mixed_key(entry) for entry in entries]


def _mixed_key(entry: Any) -> tuple[Any, ...]:
    """Return the sort key of an entry among entries of any types."""
    if type(entry) is int:
        return (0, entry)
    if type(entry) is str:
        return (1, entry)
    return (2, type(entry).__name__, repr(entry))


def _entry_text(entry: object) -> str:
    if type(entry) is str:
        return entry
    text = repr(entry)
    if " at 0x" in text:
        raise TypeError(
            f"the tree has the key {text}, whose text differs between ranks, so leaves cannot be "
            "named by it; use a string or an integer, or give its type a __repr__"
        )
    return text


def _disambiguated(paths: list[str], codes: list[str]) -> list[str]:
    """Replace clashing paths, such as those of {"a.b": x, "a": {"b": y}}, by code."""
    counts = Counter(paths)
    mixed = [code if counts[path] > 1 else path for path, code in zip(paths, codes, strict=True)]
    for unique in (mixed, codes):
        if len(set(unique)) == len(unique):
            return unique
    [(path, count)] = Counter(codes).most_common(1)
    raise ValueError(f"{count} leaves have the path {path!r}; rename keys so that paths differ")
