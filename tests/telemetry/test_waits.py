"""Times at which a thread waited for others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from fddp.core.timeline import Interval
from fddp.telemetry.waits import LEAST_S, note_wait, waits_since


@pytest.mark.parametrize(
    ("noted", "since_s", "found"),
    [
        ([(1.0, 2.0), (3.0, 4.0)], 0.0, ((1.0, 2.0), (3.0, 4.0))),
        ([(1.0, 2.0), (3.0, 4.0)], 1.5, ((3.0, 4.0),)),
        ([(1.0, 2.0), (3.0, 4.0), (2.5, 5.0)], 0.0, ((1.0, 2.0), (2.5, 5.0))),
        ([(1.0, 2.0), (3.0, 4.0), (0.5, 5.0)], 0.0, ((0.5, 5.0),)),
        ([(1.0, 1.0 + LEAST_S / 2), (2.0, 2.0 + 2 * LEAST_S)], 0.0, ((2.0, 2.0 + 2 * LEAST_S),)),
    ],
    ids=["in order", "later ones", "one within another", "all within one", "at once"],
)
def test_waits_are_disjoint(
    noted: list[Interval], since_s: float, found: tuple[Interval, ...]
) -> None:
    """Of nested waits the outer one ends last, and is the only one that counts."""

    def waits_of_a_new_thread() -> tuple[Interval, ...]:
        for wait in noted:
            note_wait(*wait)
        return waits_since(since_s)

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(waits_of_a_new_thread).result() == found
