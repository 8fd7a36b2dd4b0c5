"""Times of TCP connections between ranks."""

from __future__ import annotations

import socket
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fddp.watch.links import Sent, link_times_s, sent_per_step, sent_so_far

DATA, SMALL = 1e6, 2e3  # bytes per step


def sent_between(
    busy_s: dict[tuple[int, int], float], ranks: int, nbytes: float
) -> list[list[Sent]]:
    """Data of a connection between each two ranks, by sender."""
    return [
        [
            Sent((f"host{a}:{b}", f"host{b}:{a}"), nbytes, busy_s.get((a, b), 0.0))
            for b in range(ranks)
            if b != a
        ]
        for a in range(ranks)
    ]


_seconds = st.floats(0.0, 0.001)


@given(st.integers(3, 7), st.data(), st.floats(0.01, 1.0), st.booleans())
def test_the_link_of_a_slow_rank_takes_longest(
    ranks: int, data: st.DataObject, delay_s: float, is_ring: bool
) -> None:
    """Where all exchange data, and in a ring of sends to the next rank, in one direction."""
    slow = data.draw(st.integers(0, ranks - 1))
    pairs = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
    used = [(a, b) for a, b in pairs if not is_ring or b == (a + 1) % ranks]
    busy_s = {pair: data.draw(_seconds) + delay_s * (slow in pair) for pair in used}
    everyones = sent_between({}, ranks, SMALL)  # such as messages of other collectives
    for a, b in used:
        everyones[a].append(Sent((f"ring{a}:{b}", f"ring{b}:{a}"), DATA, busy_s[a, b]))
        everyones[b].append(Sent((f"ring{b}:{a}", f"ring{a}:{b}"), SMALL, 0.0))
    times_s = link_times_s(everyones)
    for rank, link_s in enumerate(times_s):
        assert link_s is not None
        assert (link_s >= delay_s) == (rank == slow)


def test_one_peer_shows_nothing() -> None:
    assert link_times_s(sent_between({(0, 1): 1.0}, 2, DATA)) == [None, None]
    assert link_times_s([[]]) == [None]


def test_connections_to_others_do_not_count() -> None:
    """Such as those to a store, to data, or of ranks that do not see them."""
    everyones = sent_between({}, 3, DATA)
    everyones[0].append(Sent(("host0:9", "store:1"), 1e9, 5.0))
    assert link_times_s(everyones) == [0.0, 0.0, 0.0]


def test_little_data_shows_nothing() -> None:
    assert link_times_s(sent_between({(0, 1): 1.0}, 3, 100.0)) == [None] * 3


def test_data_per_step_is_that_since_the_previous_report() -> None:
    one, two, three = (("a:1", "b:1"), ("a:2", "b:2"), ("a:3", "b:3"))
    before = {one: Sent(one, 100, 1.0), two: Sent(two, 50, 0.5)}
    now = {one: Sent(one, 500, 2.0), two: Sent(two, 50, 0.5), three: Sent(three, 40, 0.4)}
    assert sent_per_step(before, now, 4) == [Sent(one, 100.0, 0.25), Sent(three, 10.0, 0.1)]
    assert sent_per_step(before, now, 0) == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has these counters")
@pytest.mark.parametrize("host", ["127.0.0.1", "::ffff:127.0.0.1"])
def test_both_ends_of_a_connection_are_found(host: str) -> None:
    """An end in the form of IPv6 is the same address."""
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as one:
            one.connect((host, server.getsockname()[1]))
            other, _ = server.accept()
            with other:
                before = sent_so_far()
                ends = {
                    e for e in before if e[::-1] in before and str(one.getsockname()[1]) in e[0]
                }
                assert len(ends) == 1
                one.sendall(bytes(10_000))
                assert len(other.recv(10_000, socket.MSG_WAITALL)) == 10_000
                (own,) = ends
                (sent,) = [s for s in sent_per_step(before, sent_so_far(), 1) if s.ends == own]
                assert sent.nbytes == 10_000
                assert sent.busy_s >= 0.0
