"""Numbers of examples of property tests: `make nightly` sets `EXAMPLES` to take more, and `make
quick` to take fewer."""

from __future__ import annotations

import os

from hypothesis import settings

FACTOR = float(os.environ.get("EXAMPLES", "1"))
USUAL = 40


def examples(count: int) -> settings:
    """Number of examples of one test where it is not `USUAL`: more if they are cheap and varied,
    and fewer if each is a step on ranks."""
    return settings(max_examples=scaled(count))


def scaled(count: int) -> int:
    return max(5, round(FACTOR * count))
