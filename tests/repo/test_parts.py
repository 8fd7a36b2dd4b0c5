"""Rooms after `transport` use transports by their own methods, never through their parts."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from tests.support.rooms import CAPABILITIES, MODULES, ROOMS, room_of

if TYPE_CHECKING:
    from collections.abc import Iterator

USERS = (*ROOMS[ROOMS.index("transport") + 1 :], *CAPABILITIES)
PARTS = ("status", "peers", "lock", "on_failure")  # of transports, for other transports only
VALUES = ("name", "reason", "label", "closed_by", "control_device", "members", "size_cache")


def is_transport(node: ast.expr) -> bool:
    name = getattr(node, "attr", getattr(node, "id", ""))
    return name in ("transport", "_transport")


def reaching_through(source: str) -> Iterator[str]:
    """Attributes of a transport's parts, and the parts themselves."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Attribute):
            continue
        owner = node.value
        is_part = is_transport(owner) and (node.attr in PARTS or node.attr.startswith("_"))
        is_of_part = (
            isinstance(owner, ast.Attribute)
            and is_transport(owner.value)
            and owner.attr not in VALUES
        )
        if is_part or is_of_part:
            yield ast.unparse(node)


def test_transports_are_not_reached_through() -> None:
    found = [
        f"{module}: {chain}"
        for module, path in MODULES.items()
        if room_of(module) in USERS
        for chain in reaching_through(path.read_text())
    ]
    assert found == []


def test_chains_are_found() -> None:
    for source, found in {
        "self.transport.status.board.gave_up": [
            "self.transport.status.board",
            "self.transport.status",
        ],
        "found.transport.status.close = f": [
            "found.transport.status.close",
            "found.transport.status",
        ],
        "status = transport.status": ["transport.status"],
        "self._transport._c10d": ["self._transport._c10d"],
        "transport.detector.ended()": ["transport.detector.ended"],
        "transport.control_device.type": [],
        "transport.size_cache.get(0)": [],
        "self.transport.all_reduce(x).wait(what)": [],
    }.items():
        assert list(reaching_through(source)) == found, source
