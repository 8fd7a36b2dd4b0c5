"""Rank and size of a group of either kind: of processes, or of threads."""

from __future__ import annotations

from typing import Any


def rank_of(group: Any) -> int:
    """Return the caller's rank in the group."""
    return group.rank if isinstance(group.rank, int) else int(group.rank())


def size_of(group: Any) -> int:
    """Return the number of ranks in the group."""
    return group.size if isinstance(group.size, int) else int(group.size())
