"""What all tests share."""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING
from unittest import mock

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest_plugins = ["tests.support.ranks", "tests.support.hosts"]

# Ranks share the cores, so that the time one example takes says nothing about it.
settings.register_profile("fddp", deadline=None)
settings.load_profile("fddp")


@pytest.fixture(scope="session", autouse=True)
def _folder_of_launchers() -> Iterator[None]:
    """torchrun, and processes that are killed, leave folders where temporary files go."""
    with (
        tempfile.TemporaryDirectory(prefix="fddp_", ignore_cleanup_errors=True) as folder,
        mock.patch.dict(os.environ, TMPDIR=folder),
    ):
        yield
