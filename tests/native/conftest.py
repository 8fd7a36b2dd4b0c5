"""Fixtures of the tests of the extension."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.pack_cases import IMPLEMENTATIONS


@pytest.fixture(params=IMPLEMENTATIONS)
def ops(request: pytest.FixtureRequest) -> Any:
    return IMPLEMENTATIONS[request.param]
