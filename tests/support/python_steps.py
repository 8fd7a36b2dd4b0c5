"""Steps whose instructions are functions of Python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fddp.runtime.compiled import CompiledProgram


@contextmanager
def only_python() -> Iterator[None]:
    """Programs that are compiled within have no native instruction but the waits."""
    init = CompiledProgram.__init__

    def without_native(code: CompiledProgram, *args: Any) -> None:
        init(code, *args)
        code.is_native = code.packs_natively = code.has_views = code.has_regular_words = False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompiledProgram, "__init__", without_native)
        yield
