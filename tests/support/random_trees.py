"""Trees of all containers, drawn by Hypothesis."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any, NamedTuple

from hypothesis import strategies as st


class Point(NamedTuple):
    """A named tuple whose fields are not in alphabetical order."""

    y: Any
    x: Any


keys = st.one_of(st.text("ab.", max_size=2), st.integers(-3, 12), st.sampled_from([1.5, (1, 2)]))

trees = st.recursive(
    st.integers() | st.none(),
    lambda below: st.one_of(
        st.lists(below, max_size=3),
        st.lists(below, max_size=3).map(tuple),
        st.lists(below, max_size=3).map(deque),
        st.builds(Point, below, below),
        st.dictionaries(keys, below, max_size=3),
        st.dictionaries(keys, below, max_size=3).map(OrderedDict),
    ),
    max_leaves=12,
)
