"""Choice of the way in which the ranks of a process group communicate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class BackendChoice(NamedTuple):
    """The way in which the ranks of a process group communicate, the same on all of them.

    Attributes:
        name: "shm" for shared memory; "shm+gloo" for shared memory within each host and gloo
            between hosts; or "gloo".
        reason: why this way was chosen, in a few words.
    """

    name: Literal["shm", "shm+gloo", "gloo"]
    reason: str


def choose_backend(hosts: Sequence[tuple[int, ...]], description: str) -> BackendChoice:
    """Return the way for ranks that lie on these hosts.

    Shared memory within several hosts needs hosts that line up, as the axes of a hierarchical
    schedule do: the rank is the number of the host times the number of ranks on each, plus the
    number on the host.

    Args:
        hosts: ranks by host, in the order of their first ranks; every rank once.
        description: of the hosts, for the reason.

    Example:
        >>> choose_backend([(0, 1), (2, 3)], "two hosts").name
        'shm+gloo'
        >>> choose_backend([(0, 1), (2,)], "two hosts").reason
        'two hosts; the hosts have different numbers of ranks'
    """
    if len(hosts) == 1:
        return BackendChoice("shm", f"all {len(hosts[0])} ranks share the memory of a host")
    if all(len(host) == 1 for host in hosts):
        return BackendChoice("gloo", description)
    if len({len(host) for host in hosts}) > 1:
        return BackendChoice("gloo", f"{description}; the hosts have different numbers of ranks")
    if any(host != tuple(range(host[0], host[0] + len(host))) for host in hosts):
        return BackendChoice("gloo", f"{description}; the ranks of a host do not follow each other")
    return BackendChoice("shm+gloo", f"{description}; shared memory within a host, gloo across")
