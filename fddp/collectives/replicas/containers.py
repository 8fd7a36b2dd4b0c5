"""Containers of a tree as JSON, so that a rank without the tree can build it without unpickling."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any

from fddp.core.protocol.messages import decode

_MAX_DEPTH = 200
_DICTS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict}
_SEQUENCES: dict[str, type[list[Any]] | type[tuple[Any, ...]]] = {"list": list, "tuple": tuple}
_NAMES = {container: name for name, container in {**_DICTS, **_SEQUENCES}.items()}


def containers_to_json(tree: Any) -> str:
    """Containers of a tree as JSON. Anything but a dict, OrderedDict, list or tuple is a leaf.

    Raises:
        ValueError: a key is neither text nor an integer, or the tree is more than 200 levels deep.

    Example:
        >>> containers_to_json({"w": 1.0, "moments": (2.0, [3.0])})
        '["dict",["w",null],["moments",["tuple",null,["list",null]]]]'
    """
    return json.dumps(_described(tree, 0), separators=(",", ":"))


def containers_from_json(text: str) -> Any:
    """A tree of these containers, with None for leaves. Inverse of `containers_to_json`.

    Raises:
        ValueError: the text is malformed.

    Example:
        >>> containers_from_json('["dict",["w",null],["moments",["tuple",null,["list",null]]]]')
        {'w': None, 'moments': (None, [None])}
    """
    return _made(decode(text, object), 0)


def _described(node: Any, depth: int) -> Any:
    name = _NAMES.get(type(node))
    if name is None:
        return None
    if depth == _MAX_DEPTH:
        raise ValueError(f"the tree is more than {_MAX_DEPTH} levels deep")
    if name in _SEQUENCES:
        return [name, *(_described(child, depth + 1) for child in node)]
    for key in node:
        if type(key) not in (str, int):
            raise ValueError(f"the key {key!r} is neither text nor an integer")
    return [name, *([key, _described(child, depth + 1)] for key, child in node.items())]


def _made(node: Any, depth: int) -> Any:
    if node is None:
        return None
    if depth == _MAX_DEPTH or not isinstance(node, list) or not node:
        raise ValueError("the description of a tree is malformed or too deep")
    name, *children = node
    if isinstance(name, str) and name in _SEQUENCES:
        return _SEQUENCES[name](_made(child, depth + 1) for child in children)
    if isinstance(name, str) and name in _DICTS:
        for child in children:
            if not (isinstance(child, list) and len(child) == 2 and type(child[0]) in (str, int)):
                raise ValueError("the description of a tree has an entry without a key")
        return _DICTS[name]((key, _made(value, depth + 1)) for key, value in children)
    raise ValueError(f"the description of a tree has a container {name!r:.40}")
