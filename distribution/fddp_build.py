"""Build backend: scikit-build-core, with the torch that the extension is built against.

Machine code of one torch works with no other, and pip builds in an environment of its own, where it
would fetch the newest. So the torch of the environment that fddp is installed into is used where
the build can see it, which also saves the download. Otherwise the build is refused with the
commands that work.

`pip install --config-settings torch=2.13.0 .` names another torch, which is fetched for the build.
It must be the one that fddp is used with.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TypeAlias

from scikit_build_core import build as _backend

Settings: TypeAlias = "dict[str, list[str] | str] | None"

_SETTING = "torch"
_SOURCES = Path(__file__).resolve().parents[1]
_WITHOUT_ISOLATION = (
    "with `--no-build-isolation`, after `pip install scikit-build-core cmake ninja`, or with "
    "`--config-settings torch=VERSION`, the version that fddp will be used with"
)


def get_requires_for_build_sdist(config_settings: Settings = None) -> list[str]:
    return list(_backend.get_requires_for_build_sdist(_others(config_settings)))


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    return _backend.build_sdist(sdist_directory, _others(config_settings))


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    return _requires(_backend.get_requires_for_build_wheel, config_settings)


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    return _requires(_backend.get_requires_for_build_editable, config_settings)


def prepare_metadata_for_build_wheel(
    metadata_directory: str, config_settings: Settings = None
) -> str:
    others = _others(config_settings)
    return _backend.prepare_metadata_for_build_wheel(metadata_directory, others)


def prepare_metadata_for_build_editable(
    metadata_directory: str, config_settings: Settings = None
) -> str:
    others = _others(config_settings)
    return _backend.prepare_metadata_for_build_editable(metadata_directory, others)


def build_wheel(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    settings = _for_cmake(config_settings)
    return _backend.build_wheel(wheel_directory, settings, metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    settings = _for_cmake(config_settings)
    return _backend.build_editable(wheel_directory, settings, metadata_directory)


def _requires(of_backend: Callable[[Settings], list[str]], settings: Settings) -> list[str]:
    """Packages to fetch for a build: torch only if its version is given."""
    requires = list(of_backend(_others(settings)))
    version = (settings or {}).get(_SETTING)
    if version:
        return [*requires, f"torch=={version}"]
    _check_torch()
    return requires


def _for_cmake(settings: Settings) -> Settings:
    """Settings with the folders that an isolated build hides from its interpreter."""
    _check_compiler()
    path = os.pathsep.join(_path_outside())
    return {**(_others(settings) or {}), "cmake.define.FDDP_PYTHON_PATH": path}


def _others(settings: Settings) -> Settings:
    return {name: value for name, value in (settings or {}).items() if name != _SETTING}


def _check_torch() -> None:
    lowest = lowest_torch()
    version = installed_torch([*sys.path, *_path_outside()])
    if version is None:
        raise SystemExit(
            "fddp's extension fits one version of torch, and this build sees none installed. "
            f"Run `pip install 'torch>={lowest}'` before `pip install .`; with uv and other "
            f"front ends, install {_WITHOUT_ISOLATION}"
        )
    if _numbers(version) < _numbers(lowest):
        raise SystemExit(
            f"torch {version} is installed, and fddp needs {lowest} or later: run "
            f"`pip install --upgrade 'torch>={lowest}'` before `pip install .`"
        )


def _check_compiler() -> None:
    """Refuse a compiler that does not exist in one line, before CMake does in twenty."""
    compiler = shlex.split(os.environ.get("CXX", ""))[:1]
    if compiler and shutil.which(compiler[0]) is None:
        raise SystemExit(
            f"CXX names {compiler[0]!r}, which is not found: set CXX to a C++20 compiler (GCC 10, "
            "Clang 12 or later), or unset it"
        )


def lowest_torch() -> str:
    """Lowest version of torch that the package allows."""
    project = (_SOURCES / "pyproject.toml").read_text(encoding="utf-8")
    (requirement,) = re.findall(r'"torch(?:>=|==)([\d.]+)"', project)
    return str(requirement)


def installed_torch(path: list[str]) -> str | None:
    """Version of the torch in the first of these folders that has one. It is not imported."""
    spec = PathFinder.find_spec("torch", path)
    if spec is None or spec.origin is None:
        return None
    source = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    (version,) = re.findall(r"^__version__ = '([^'+]+)", source, re.MULTILINE)
    return str(version)


def _path_outside() -> list[str]:
    """`sys.path` of this interpreter outside of pip's isolation, which is made of variables."""
    variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONNOUSERSITE")}
    command = [sys.executable, "-c", "import sys; print(*sys.path[1:], sep='\\n')"]
    printed = subprocess.run(command, env=variables, check=True, capture_output=True, text=True)
    return [folder for folder in printed.stdout.splitlines() if folder]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])
