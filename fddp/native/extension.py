"""Loader of the compiled extension `fddp._C`. No other module imports it at run time.

`compiled` is the extension, which is loaded when it is first used. `fddp/_C.pyi` has its types.

Its machine code fits only the torch version that it was built for. The build stores that version in
a file beside the extension, so that a mismatch is reported before symbols fail to resolve.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from fddp.errors import ExtensionError

if TYPE_CHECKING:
    from fddp import _C

    compiled = _C
else:

    def __getattr__(name: str) -> ModuleType:
        if name != "compiled":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()["compiled"] = module = load()
        return module


__all__ = ["compiled", "load"]

_REBUILD = "run `pip install .` in fddp's source directory"


@cache
def load() -> ModuleType:
    """Return the module `fddp._C`, loading it at the first call.

    Raises:
        ExtensionError: it is not built, was built for another torch, or cannot be loaded. The
            message has both versions and the build command. There is no fallback.

    Example:
        >>> load().torch_version == torch.__version__.split("+")[0]
        True
    """
    spec = find_spec("fddp._C")
    if spec is None or spec.origin is None:
        raise ExtensionError(f"the compiled extension fddp._C is not built: {_REBUILD}")
    built_for = _torch_built_for(Path(spec.origin))
    # The suffix after "+" separates CPU from CUDA builds of a release; both fit.
    installed = torch.__version__.split("+")[0]
    if built_for != installed:
        raise ExtensionError(
            f"fddp._C was built for torch {built_for}, but torch {installed} is installed: "
            f"{_REBUILD} to rebuild it"
        )
    try:
        return import_module("fddp._C")
    except ImportError as error:
        raise ExtensionError(
            f"fddp._C, built for the installed torch {installed}, cannot be loaded ({error}): "
            f"{_REBUILD} to rebuild it"
        ) from error


def _torch_built_for(library: Path) -> str:
    note = library.with_name("_C.torch_version")
    try:
        return note.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ExtensionError(
            f"cannot read which torch {library} was built for ({error}): {_REBUILD}"
        ) from error
