"""Discovery of the ranks that share a host: each rank maps the others' memory and writes into it.

Ranks on one host may be unable to share memory, and environment variables that describe hosts may
be wrong for parts of a job. Ranks therefore test it, in stages. In each stage every rank runs a
step that may fail locally, and all ranks exchange the outcomes, so that they decide alike. A socket
is read only after all ranks know that it was written. Ranks thus wait for each other only in
exchanges, which have a timeout.
"""

from __future__ import annotations

import json
import os
import secrets
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from fddp.core.protocol.messages import AnyOf, Schema, decode, optional
from fddp.native import extension
from fddp.transport.shm.fd_passing import (
    MOST_DESCRIPTORS,
    FdConnection,
    FdListener,
    ForeignUserError,
    connect,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from fddp._C import ShmArena, ShmView

_SECRET_BYTES = 16
_MAX_PROBLEM_CHARS = 300
_MAX_HOSTS_SHOWN = 4
_MAX_FDS_IN_FLIGHT = 512  # half of the usual limit of a user
_MAX_ARENA_BYTES = 1 << 47  # larger than any arena


class Exchange(Protocol):
    """Part of a transport that the discovery uses. `exchange` returns all payloads, by rank."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def exchange(self, payload: bytes) -> Sequence[bytes]: ...


class HostGroups(NamedTuple):
    """Result of the discovery.

    [Note: who shares a host] `hosts` is a partition of the ranks. Two ranks are in one part if
    every rank of the part has mapped the memory of every other one and has found their data in its
    own. If one rank of a host fails in this, each rank of that host forms a part of its own.

    Attributes:
        hosts: ranks by host, the same on all ranks.
        problems: errors that stopped ranks, by rank, the same on all ranks.
        arena: this rank's memory. None if it shares its host with no other rank.
        views: memory of the other ranks on its host, by rank.
    """

    hosts: tuple[tuple[int, ...], ...]
    problems: dict[int, str]
    arena: ShmArena | None
    views: dict[int, ShmView]

    def share_host(self, ranks: Sequence[int]) -> bool:
        return any(set(ranks) <= set(host) for host in self.hosts)

    def describe(self, problems: Mapping[int, str]) -> str:
        """Return the reason why not all ranks share memory.

        >>> found = HostGroups(((0, 1), (2, 3), (4,)), {}, None, {})
        >>> found.describe({4: "no file descriptors"})
        'the ranks are on 3 hosts or parts of them (0-1, 2-3, 4); rank 4: no file descriptors'
        """
        shown = [_span(host) for host in self.hosts[:_MAX_HOSTS_SHOWN]]
        shown += ["..."] if len(self.hosts) > _MAX_HOSTS_SHOWN else []
        text = f"the ranks are on {len(self.hosts)} hosts or parts of them ({', '.join(shown)})"
        text = text if len(self.hosts) > 1 else "the ranks share a host, but could not use it"
        return text + "".join(f"; rank {rank}: {why}" for rank, why in [*problems.items()][:1])

    def without_memory(self) -> HostGroups:
        return self._replace(arena=None, views={})


class StagedExchange:
    """A sequence of local steps, after each of which ranks exchange the outcomes. `problems` are
    errors that stopped ranks, by rank, the same on all ranks."""

    def __init__(self, transport: Exchange) -> None:
        self.problems: dict[int, str] = {}
        self._transport = transport

    def stopped(self, ranks: Sequence[int]) -> bool:
        return any(rank in self.problems for rank in ranks)

    def stage(
        self,
        do: Callable[[], Any],
        schema: Schema = object,
        is_valid: Callable[[Any], bool] = lambda _: True,
    ) -> list[Any]:
        """Run `do` on each rank without a problem and return all ranks' results, as decoded JSON.

        The result of a rank with a problem is None. An operating-system error in `do` becomes the
        problem of this rank. A message that does not fit `schema`, or is not valid, becomes the
        problem of its sender, on all ranks.
        """
        problem, result = self.problems.get(self._transport.rank), None
        if problem is None:
            try:
                result = do()
            except (OSError, ValueError, RuntimeError, MemoryError) as error:
                problem = str(error)[:_MAX_PROBLEM_CHARS] or type(error).__name__
        outcome = AnyOf(((str, object), (None, optional(schema))))
        results = []
        for rank, text in enumerate(
            self._transport.exchange(json.dumps([problem, result]).encode())
        ):
            try:
                why, value = decode(text, outcome)
            except ValueError:
                why, value = _malformed(text), None
            if why is None and value is not None and not is_valid(value):
                why = _malformed(text)
            if why is not None:
                self.problems[rank] = why[:_MAX_PROBLEM_CHARS]
            results.append(value if why is None else None)
        return results


def _malformed(text: bytes) -> str:
    return f"it sent a malformed message: {text[:40]!r}"


def discover_hosts(transport: Exchange) -> HostGroups:
    """Find the ranks that share this rank's host; a collective call of `transport`; blocks."""
    exchange = StagedExchange(transport)
    with ExitStack() as sockets:
        search = _HostDiscovery(transport.rank, sockets)
        listeners = exchange.stage(search.open_listener, (str, str))
        found = exchange.stage(
            lambda: search.connect_to_leader(listeners),
            (int, str),
            lambda found: 0 <= found[0] < transport.world_size,
        )
        leaders = [None if answer is None else answer[0] for answer in found]
        host = _hosts(leaders, exchange.problems)[transport.rank]

        def stage(
            do: Callable[[], Any],
            schema: Schema = object,
            is_valid: Callable[[Any], bool] = lambda _: True,
        ) -> list[Any]:
            """Run a stage, in which only ranks that may still share a host do something."""
            idle = len(host) == 1 or exchange.stopped(host)
            return exchange.stage(lambda: None if idle else do(), schema, is_valid)

        arenas = stage(lambda: search.send(host), (int, int), _is_arena_offset)
        for number in range(_rounds(_hosts(leaders, {}))):
            stage(partial(search.distribute_fds, host, listeners, number))
        stage(lambda: search.map_all(host, arenas))
        stage(lambda: search.check(host, listeners))
    hosts = _hosts(leaders, exchange.problems)
    remarks = {rank: answer[1] for rank, answer in enumerate(found) if answer and answer[1]}
    problems = {**remarks, **exchange.problems}
    groups = HostGroups(tuple(dict.fromkeys(hosts)), problems, search.arena, search.views)
    return groups if len(hosts[transport.rank]) > 1 else groups.without_memory()


def _is_arena_offset(value: list[int]) -> bool:
    span, offset = value
    return 0 <= offset < span < _MAX_ARENA_BYTES


class _HostDiscovery:
    """The local steps of the stages.

    The lowest rank of a host is its leader. The others connect to it and send it their descriptors,
    and it sends all descriptors to each of them.
    """

    def __init__(self, rank: int, sockets: ExitStack) -> None:
        self.arena: ShmArena | None = None
        self.views: dict[int, ShmView] = {}
        self._rank = rank
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._sockets = sockets
        self._listener: FdListener | None = None
        self._leader: FdConnection | None = None
        self._connections: list[FdConnection] = []  # of a leader, to the others of its host
        self._files: dict[int, int] = {}  # descriptors of the others' arenas
        self._secrets_offset = 0  # offset in this rank's arena of the others' secrets

    def open_listener(self) -> list[str]:
        """Open a listener; return its name and this rank's secret."""
        if not hasattr(os, "memfd_create"):
            raise OSError("shared memory needs memfd_create, which only Linux has")
        self._listener = FdListener()
        self._sockets.callback(self._listener.close)
        return [self._listener.name, self._secret.hex()]

    def connect_to_leader(self, listeners: Sequence[list[str] | None]) -> tuple[int, str]:
        """Connect to the lowest reachable rank; return it and a remark."""
        remark = ""
        for rank, listener in enumerate(listeners[: self._rank]):
            if listener is not None:
                try:
                    self._leader = connect(listener[0])
                except ForeignUserError as error:
                    remark = f"{error}; that is rank {rank}"
                if self._leader is not None:
                    self._sockets.callback(self._leader.close)
                    return rank, remark
        return self._rank, remark

    def send(self, host: tuple[int, ...]) -> tuple[int, int]:
        """Create the arena and send it to the leader; return its span and its secrets' offset.

        The spans of a host's arenas add up to the host's memory, because every rank reserves
        addresses for all of them and no rank is expected to need more than its part.
        """
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self.arena = extension.compiled.ShmArena(memory // len(host))
        offset = self.arena.allocate_zeroed(_SECRET_BYTES * len(host))
        if offset is None:
            raise OSError("no memory can be reserved for shared pages")
        self._secrets_offset = offset
        if self._leader is not None:
            identity = json.dumps([self._rank, self._secret.hex()]).encode()
            self._leader.send(identity, (self.arena.fd,))
        return self.arena.span, self._secrets_offset

    def distribute_fds(
        self, host: tuple[int, ...], listeners: Sequence[list[str]], number: int
    ) -> None:
        """Collect all descriptors on the leader and send them to some of the other ranks.

        The system limits the number of descriptors in flight per user. The ranks therefore receive
        them in several rounds, each rank one round after they were sent to it.
        """
        size = _at_once(len(host))
        if self._leader is not None and host.index(self._rank) <= number * size:
            self._receive_all(host)
        if self.arena is None or self._rank != host[0]:
            return
        if number == 0:
            self._connections = self._accept({rank: listeners[rank][1] for rank in host[1:]})
        connections = self._connections[number * size : (number + 1) * size]
        files = {self._rank: self.arena.fd, **self._files}
        for start in range(0, len(host), MOST_DESCRIPTORS):
            ranks = host[start : start + MOST_DESCRIPTORS]
            for connection in connections:
                connection.send(json.dumps(ranks).encode(), [files[rank] for rank in ranks])

    def map_all(self, host: tuple[int, ...], arenas: Sequence[tuple[int, int]]) -> None:
        self._receive_all(host)
        for rank, descriptor in self._files.items():
            span, offset = arenas[rank]
            self.views[rank] = extension.compiled.ShmView(descriptor, span)
            self.views[rank].write(offset + _SECRET_BYTES * host.index(self._rank), self._secret)

    def _receive_all(self, host: tuple[int, ...]) -> None:
        while self._leader is not None and len(self._files) < len(host) - 1:
            message = self._leader.receive()
            try:
                ranks = decode(message.note, [int])
                if len(message.descriptors) != len(ranks) or not set(ranks) <= set(host):
                    raise ValueError(f"{message.note[:40]!r}")
            except ValueError as error:
                message.close()
                raise ValueError(
                    f"the leader of the host sent a malformed message: {error}"
                ) from error
            self._keep(ranks, message.descriptors)

    def check(self, host: tuple[int, ...], listeners: Sequence[list[str]]) -> None:
        """Check that the others' secrets are in this rank's own memory."""
        for place, rank in enumerate(host):
            offset = self._secrets_offset + _SECRET_BYTES * place
            if rank != self._rank and self.arena is not None:
                found = self.arena.read(offset, _SECRET_BYTES)
                if found.hex() != listeners[rank][1]:
                    raise OSError(
                        f"this rank's memory lacks the data that rank {rank} wrote into it"
                    )

    def _accept(self, secrets_of: Mapping[int, str]) -> list[FdConnection]:
        """Accept the ranks that have these secrets and keep their descriptors."""
        identities = {
            json.dumps([rank, secret]).encode(): rank for rank, secret in secrets_of.items()
        }
        connections = {}
        for connection in self._listener.accept() if self._listener is not None else ():
            self._sockets.callback(connection.close)
            try:
                message = connection.receive()
            except OSError:
                continue
            rank = identities.pop(message.note, None) if len(message.descriptors) == 1 else None
            if rank is None:
                message.close()
            else:
                self._keep([rank], message.descriptors)
                connections[rank] = connection
        if identities:
            raise OSError(
                f"no descriptors arrived from ranks {sorted(identities.values())} on the socket"
            )
        return [connections[rank] for rank in secrets_of]

    def _keep(self, ranks: Sequence[int], descriptors: Sequence[int]) -> None:
        """Take ownership of the descriptor of each rank's arena."""
        for rank, file in zip(ranks, descriptors, strict=True):
            self._sockets.callback(os.close, file)
            if rank != self._rank:
                self._files.setdefault(rank, file)


def _hosts(
    leaders: Sequence[int | None], problems: Mapping[int, str]
) -> tuple[tuple[int, ...], ...]:
    """Members of each rank's host, by rank; see [Note: who shares a host]."""
    members: dict[int, list[int]] = {}
    for rank, leader in enumerate(leaders):
        if leader is not None and leaders[leader] == leader:
            members.setdefault(leader, []).append(rank)
    hosts: list[tuple[int, ...]] = [(rank,) for rank in range(len(leaders))]
    for host in members.values():
        if not any(rank in problems for rank in host):
            for rank in host:
                hosts[rank] = tuple(host)
    return tuple(hosts)


def _at_once(size: int) -> int:
    """Number of ranks of a host of this size that receive descriptors in one round."""
    return max(1, _MAX_FDS_IN_FLIGHT // size)


def _rounds(hosts: Sequence[tuple[int, ...]]) -> int:
    """Number of rounds of `distribute_fds`, the same on all hosts.

    >>> _rounds([(0, 1), (2, 3, 4)]), _rounds([tuple(range(128))])
    (1, 32)
    """
    return max(-(-(len(host) - 1) // _at_once(len(host))) or 1 for host in hosts)


def _span(host: tuple[int, ...]) -> str:
    if len(host) > 1 and host == tuple(range(host[0], host[-1] + 1)):
        return f"{host[0]}-{host[-1]}"
    return "+".join(map(str, host))
