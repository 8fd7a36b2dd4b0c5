"""Which ranks share a host, proved by doing: each maps the others' memory and writes into it.

Ranks that were started on one host may be unable to share memory, and what the environment says of
hosts is wrong for parts of a job. So ranks find out by themselves, in stages. In each of them every
rank does something that may fail there alone, and then all tell each other how it went, so that all
decide alike. A socket is read only when all know that it was written; so nobody waits for a rank
but in an exchange, which has a timeout.
"""

from __future__ import annotations

import json
import os
import secrets
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from fddp.transport.shm.bindings import make_arena, view_arena
from fddp.transport.shm.fd_passing import (
    MOST_DESCRIPTORS,
    FdConnection,
    FdListener,
    ForeignUserError,
    connect,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from fddp.transport.base import Transport
    from fddp.transport.shm.bindings import Arena, View

_SECRET_BYTES = 16
_LONGEST_TEXT = 300  # of a problem
_SHOWN = 4  # hosts in a text
_MAX_FDS_IN_FLIGHT = (
    512  # descriptors that a host's leader has sent, half of what is usually allowed
)
_MAX_ARENA_BYTES = 1 << 47  # bytes; above what any arena has
_RANKS_PER_MESSAGE = MOST_DESCRIPTORS // 2  # in a message; two descriptors a rank


class HostGroups(NamedTuple):
    """What a rank has found; `hosts` and `problems` are the same on all ranks.

    [Note: who shares a host] `hosts` is a partition of the ranks: two are in one part if every rank
    of the part has mapped the memory of every other one, and found what it wrote in its own. Where
    a rank of a host fails in this, each rank of that host is alone.
    """

    hosts: tuple[tuple[int, ...], ...]
    problems: dict[int, str]  # what stopped ranks, by rank
    arena: Arena | None  # this rank's; None if it is alone
    views: dict[int, View]  # of the others on its host
    processes: Processes  # theirs

    def share_host(self, ranks: Sequence[int]) -> bool:
        """Whether all of `ranks` are on one host."""
        return any(set(ranks) <= set(host) for host in self.hosts)

    def describe(self, problems: Mapping[int, str]) -> str:
        """Why not all ranks share memory, in words.

        >>> found = HostGroups(((0, 1), (2, 3), (4,)), {}, None, {}, Processes())
        >>> found.describe({4: "no file descriptors"})
        'the ranks are on 3 hosts or parts of them (0-1, 2-3, 4); rank 4: no file descriptors'
        """
        shown = [_span(host) for host in self.hosts[:_SHOWN]]
        shown += ["..."] if len(self.hosts) > _SHOWN else []
        text = f"the ranks are on {len(self.hosts)} hosts or parts of them ({', '.join(shown)})"
        text = text if len(self.hosts) > 1 else "the ranks share a host, but could not use it"
        return text + "".join(f"; rank {rank}: {why}" for rank, why in [*problems.items()][:1])

    def close(self) -> HostGroups:
        """Lets go of what is held; the same without it."""
        self.processes.close()
        return self._replace(arena=None, views={})


class Processes(dict[int, int]):
    """The pidfds of other ranks' processes, by rank.

    They are closed with the last reference at the latest: what holds them may be let go of without
    having been closed, as a wrapped module is.
    """

    _close = staticmethod(os.close)  # modules may be gone before this is

    def close(self) -> None:
        """Closes all; a second call does nothing."""
        while self:
            self._close(self.popitem()[1])

    def __del__(self) -> None:
        self.close()


class StagedExchange:
    """Ranks that go through stages together.

    Attributes:
        problems: what stopped ranks, by rank; the same on all.
    """

    def __init__(self, transport: Transport) -> None:
        self.problems: dict[int, str] = {}
        self._transport = transport

    def stopped(self, ranks: Sequence[int]) -> bool:
        """Whether any of these ranks has a problem."""
        return any(rank in self.problems for rank in ranks)

    def stage(
        self, do: Callable[[], Any], is_sound: Callable[[Any], bool] = lambda _: True
    ) -> list[Any]:
        """Every rank's result of `do`, as JSON holds it; None for those that have a problem.

        An error that comes from the system becomes the problem of this rank. What a rank tells that
        is not `is_sound` becomes the problem of that rank, on all alike.
        """
        problem, result = self.problems.get(self._transport.rank), None
        if problem is None:
            try:
                result = do()
            except (OSError, ValueError, RuntimeError, MemoryError) as error:
                problem = str(error)[:_LONGEST_TEXT] or type(error).__name__
        received = self._transport.exchange(json.dumps([problem, result]).encode())
        decoded = [_decode_result(text, is_sound) for text in received]
        self.problems |= {rank: why for rank, (why, _) in enumerate(decoded) if why is not None}
        return [value for _, value in decoded]


def _decode_result(text: bytes, is_sound: Callable[[Any], bool]) -> tuple[str | None, Any]:
    """A rank's problem and result, out of what it sent."""
    try:
        why, value = json.loads(text)
        if why is not None:
            return str(why)[:_LONGEST_TEXT], None
        if value is None or is_sound(value):
            return None, value
    except (ValueError, TypeError, RecursionError):  # no JSON, or no pair
        pass
    return f"what it told the others makes no sense: {text[:40]!r}", None


def discover_hosts(transport: Transport) -> HostGroups:
    """Find out who shares this rank's host; every rank of `transport` calls this, which blocks.

    Raises:
        FddpError: as an operation of `transport` that fails.
    """
    exchange = StagedExchange(transport)
    with ExitStack() as sockets:
        search = _HostDiscovery(transport.rank, sockets)
        try:
            listeners = exchange.stage(
                search.open_listener, lambda listener: _is_pair(listener, str, str)
            )
            found = exchange.stage(
                lambda: search.connect_to_leader(listeners),
                lambda found: _is_pair(found, int, str) and 0 <= found[0] < transport.world_size,
            )
            leaders = [None if answer is None else answer[0] for answer in found]
            host = _hosts(leaders, exchange.problems)[transport.rank]

            def stage(
                do: Callable[[], Any], is_sound: Callable[[Any], bool] = lambda _: True
            ) -> list[Any]:
                """As `exchange.stage`, for those who may still share a host."""
                idle = len(host) == 1 or exchange.stopped(host)
                return exchange.stage(lambda: None if idle else do(), is_sound)

            arenas = stage(lambda: search.send(host), _is_arena_offset)
            for number in range(_rounds(_hosts(leaders, {}))):
                stage(partial(search.distribute_fds, host, listeners, number))
            stage(lambda: search.map_all(host, arenas))
            stage(lambda: search.check(host, listeners))
        except BaseException:
            search.processes.close()
            raise
    hosts = _hosts(leaders, exchange.problems)
    remarks = {rank: answer[1] for rank, answer in enumerate(found) if answer and answer[1]}
    problems = {**remarks, **exchange.problems}
    if len(hosts[transport.rank]) > 1:
        return HostGroups(
            tuple(dict.fromkeys(hosts)), problems, search.arena, search.views, search.processes
        )
    search.processes.close()
    return HostGroups(tuple(dict.fromkeys(hosts)), problems, None, {}, search.processes)


def _is_pair(value: Any, first: type, second: type) -> bool:
    """Whether it is a list of two values of just these types."""
    return isinstance(value, list) and [type(item) for item in value] == [first, second]


def _is_arena_offset(value: Any) -> bool:
    """Whether it is the span of an arena and an offset in it."""
    return _is_pair(value, int, int) and 0 <= value[1] < value[0] < _MAX_ARENA_BYTES


class _HostDiscovery:
    """What a rank does in each stage.

    A host's lowest rank is its leader. The others connect to it and send it their descriptors, and
    it sends each all of them.
    """

    def __init__(self, rank: int, sockets: ExitStack) -> None:
        self.arena: Arena | None = None
        self.views: dict[int, View] = {}
        self.processes = Processes()
        self._rank = rank
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._sockets = sockets
        self._listener: FdListener | None = None
        self._leader: FdConnection | None = None
        self._connections: list[FdConnection] = []  # a leader's, to the others of its host
        self._files: dict[int, int] = {}  # of the others' arenas
        self._secrets_offset = 0  # where in this rank's arena the others leave their secrets

    def open_listener(self) -> list[str]:
        """This rank's name and secret."""
        if not hasattr(os, "pidfd_open") or not hasattr(os, "memfd_create"):
            raise OSError("anonymous files and pidfds are Linux's, and this is another system")
        self._listener = FdListener()
        self._sockets.callback(self._listener.close)
        return [self._listener.name, self._secret.hex()]

    def connect_to_leader(self, listeners: Sequence[list[str] | None]) -> tuple[int, str]:
        """The lowest rank in reach, and a remark."""
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
        """The bytes that this rank's arena spans, and where its slots are; the leader has the rest.

        The spans of a host's arenas add up to its memory: none needs more than its part as a rule,
        and every rank of every transport reserves addresses for all of them.
        """
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self.arena = make_arena(memory // len(host))
        slots = self.arena.allocate_zeroed(_SECRET_BYTES * len(host))
        if slots is None:
            raise OSError("no memory can be reserved for shared pages")
        self._secrets_offset = slots
        process = os.pidfd_open(os.getpid())
        try:
            if self._leader is not None:
                identity = json.dumps([self._rank, self._secret.hex()]).encode()
                self._leader.send(identity, (self.arena.fd, process))
        finally:
            os.close(process)
        return self.arena.span, self._secrets_offset

    def distribute_fds(
        self, host: tuple[int, ...], listeners: Sequence[list[str]], number: int
    ) -> None:
        """The leader takes what the others sent, and sends some of them everything.

        The system bounds how many descriptors of a user are on their way. So the others get theirs
        in several rounds, and take them in the round behind, the last ones when they map them.
        """
        size = _at_once(len(host))
        if self._leader is not None and host.index(self._rank) <= number * size:
            self._receive_all(host)
        if self.arena is None or self._rank != host[0]:
            return
        if number == 0:
            self._connections = self._accept({rank: listeners[rank][1] for rank in host[1:]})
        connections = self._connections[number * size : (number + 1) * size]
        process = os.pidfd_open(os.getpid())
        try:
            sent = {self._rank: (self.arena.fd, process)}
            sent |= {rank: (self._files[rank], self.processes[rank]) for rank in host[1:]}
            for start in range(0, len(host), _RANKS_PER_MESSAGE):
                ranks = host[start : start + _RANKS_PER_MESSAGE]
                descriptors = [descriptor for rank in ranks for descriptor in sent[rank]]
                for connection in connections:
                    connection.send(json.dumps(ranks).encode(), descriptors)
        finally:
            os.close(process)

    def map_all(self, host: tuple[int, ...], arenas: Sequence[tuple[int, int]]) -> None:
        """Leaves this rank's secret in the memory of every other one."""
        self._receive_all(host)
        for rank, descriptor in self._files.items():
            span, slots = arenas[rank]
            self.views[rank] = view_arena(descriptor, span)
            self.views[rank].write(slots + _SECRET_BYTES * host.index(self._rank), self._secret)

    def _receive_all(self, host: tuple[int, ...]) -> None:
        while self._leader is not None and len(self._files) < len(host) - 1:
            message = self._leader.receive()
            try:
                ranks = [int(rank) for rank in json.loads(message.note)]
                if len(message.descriptors) != 2 * len(ranks) or not set(ranks) <= set(host):
                    raise ValueError(f"the leader of the host sent {message.note[:40]!r}")
            except (ValueError, TypeError, OverflowError, RecursionError) as error:
                message.close()
                raise ValueError(f"a message makes no sense: {error}") from error
            self._keep(ranks, message.descriptors)

    def check(self, host: tuple[int, ...], listeners: Sequence[list[str]]) -> None:
        """Finds the others' secrets in this rank's own memory."""
        for place, rank in enumerate(host):
            offset = self._secrets_offset + _SECRET_BYTES * place
            if rank != self._rank and self.arena is not None:
                found = self.arena.read(offset, _SECRET_BYTES)
                if found.hex() != listeners[rank][1]:
                    raise OSError(f"what rank {rank} wrote into this rank's memory is not there")

    def _accept(self, secrets_of: Mapping[int, str]) -> list[FdConnection]:
        """Connections to the ranks that have these secrets, in order; what each sent is kept."""
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
            rank = identities.pop(message.note, None) if len(message.descriptors) == 2 else None
            if rank is None:
                message.close()
            else:
                self._keep([rank], message.descriptors)
                connections[rank] = connection
        if identities:
            raise OSError(
                f"nothing came from ranks {sorted(identities.values())} through the socket"
            )
        return [connections[rank] for rank in secrets_of]

    def _keep(self, ranks: Sequence[int], descriptors: Sequence[int]) -> None:
        """Takes over each rank's arena and process; those of this rank itself are closed."""
        for rank, file, process in zip(ranks, descriptors[::2], descriptors[1::2], strict=True):
            self._sockets.callback(os.close, file)
            if rank == self._rank or rank in self._files:
                os.close(process)
            else:
                self._files[rank], self.processes[rank] = file, process


def _hosts(
    leaders: Sequence[int | None], problems: Mapping[int, str]
) -> tuple[tuple[int, ...], ...]:
    """Each rank's host, by rank; [Note: who shares a host]."""
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
    """To how many ranks of a host of this size all descriptors are sent at a time."""
    return max(1, _MAX_FDS_IN_FLIGHT // (2 * size))


def _rounds(hosts: Sequence[tuple[int, ...]]) -> int:
    """How often descriptors are handed round, the same on all hosts.

    >>> _rounds([(0, 1), (2, 3, 4)]), _rounds([tuple(range(128))])
    (1, 64)
    """
    return max(-(-(len(host) - 1) // _at_once(len(host))) or 1 for host in hosts)


def _span(host: tuple[int, ...]) -> str:
    if len(host) > 1 and host == tuple(range(host[0], host[-1] + 1)):
        return f"{host[0]}-{host[-1]}"
    return "+".join(map(str, host))
