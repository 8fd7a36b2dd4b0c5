"""Steps without the compiled interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fddp.runtime.usual_program import UsualProgram


@contextmanager
def only_python() -> Iterator[None]:
    """No step of an engine made within is run by the compiled interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UsualProgram, "of", classmethod(lambda cls, program, transport: None))
        yield
