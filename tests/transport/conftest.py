"""Fixtures of the transports' tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.crews import Crew, crew_of


@pytest.fixture(scope="module")
def crews() -> Iterator[Callable[[int], Crew]]:
    """One crew of each size, for tests that leave it usable."""
    made: dict[int, Crew] = {}

    def get(size: int) -> Crew:
        if size not in made:
            made[size] = crew_of(size)
        return made[size]

    yield get
    for crew in made.values():
        for group in crew.groups:
            group.shutdown()
