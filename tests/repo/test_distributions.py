"""The sdist has what a build needs, the wheel has what users run, and both describe the package.

Nothing is compiled: the wheel is built without its extension.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from distribution import interpreters, matrix, release
from distribution.fddp_build import _check_compiler, installed_torch, lowest_torch
from distribution.wheels import build_sdist

if TYPE_CHECKING:
    from email.message import Message

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")

WITHOUT_CMAKE = """
import sys
sys.path.insert(0, "distribution")
import fddp_build
print(fddp_build.build_wheel(sys.argv[1], {"wheel.cmake": "false"}))
"""


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Files of the sdist."""
    pytest.importorskip("scikit_build_core")
    with tarfile.open(build_sdist(ROOT, tmp_path_factory.mktemp("sdist"))) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    pytest.importorskip("scikit_build_core")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-c", WITHOUT_CMAKE, str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return message_from_string(wheel.read(name).decode("utf-8"))


def tracked(folder: str) -> set[str]:
    listed = subprocess.run(["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return set(listed.stdout.splitlines())


def test_sdist_has_what_a_build_needs(sdist: set[str]) -> None:
    needed = {"pyproject.toml", "README.md", "LICENSE", "Makefile"}
    needed |= tracked(".github")
    assert needed | tracked("fddp") | tracked("distribution") | tracked("tests") <= sdist
    assert "fddp/csrc/CMakeLists.txt" in sdist
    tops = {name.partition("/")[0] for name in sdist}
    assert [name for name in sdist if name.startswith("fddp/_C.")] == ["fddp/_C.pyi"]
    assert not tops & {".ci", ".git", ".venv", "build", "dist", "shared"}


def test_wheel_has_what_users_run(wheel: zipfile.ZipFile) -> None:
    names = {name for name in wheel.namelist() if not name.endswith("/")}
    inside = {name for name in names if ".dist-info/" not in name}
    wanted = {name for name in tracked("fddp") if not name.startswith("fddp/csrc/")}
    assert inside == wanted  # and no extension that another build left in the sources
    assert {"fddp/py.typed", "fddp/_C.pyi"} <= inside


def test_classifiers_name_the_versions_that_are_tried(wheel: zipfile.ZipFile) -> None:
    found = set(metadata(wheel).get_all("Classifier", []))
    prefix = "Programming Language :: Python :: 3."
    minors = {name.removeprefix(prefix) for name in found if name.startswith(prefix)}
    assert minors == {version.removeprefix("3.") for version in interpreters.VERSIONS}
    assert {"Operating System :: POSIX :: Linux", "Typing :: Typed"} <= found
    assert [name for name in found if name.startswith("Development Status :: ")]
    assert metadata(wheel)["Requires-Python"] == f">={interpreters.VERSIONS[0]}"


def test_a_release_has_no_relative_links() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.compile(r"\]\((?!https?://|#)")
    assert links.search(page)
    for address in ("https://example.org/fddp", None):
        assert not links.search(release.absolute_links(page, address))
    wanted = "[a](https://example.org/fddp/blob/HEAD/docs/a.md#b), [c](#c), [d](https://d.org)"
    page = "[a](docs/a.md#b), [c](#c), [d](https://d.org)"
    assert release.absolute_links(page, "https://example.org/fddp") == wanted
    assert release.absolute_links(page, None) == "a, [c](#c), [d](https://d.org)"


def test_address_of_the_repository() -> None:
    assert release.repository('[project.urls]\nRepository = "https://example.org/a/"\n') == (
        "https://example.org/a"
    )
    assert release.repository("[project]") is None


def test_wheels_are_pinned_to_their_torch() -> None:
    changed = release.pinned(PROJECT, "2.13.0")
    assert re.search(r'^version = "\d+\.\d+\.\d+\+torch2\.13\.0"$', changed, re.MULTILINE)
    assert '"torch==2.13.0"' in changed
    assert "torch>=" not in changed
    with pytest.raises(ValueError, match="no line with the version"):
        release.pinned("", "2.13.0")


def test_installed_torch_is_found_without_importing_it(tmp_path: Path) -> None:
    assert installed_torch([str(tmp_path)]) is None
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError")
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.12.1+cu130'\n")
    assert installed_torch([str(tmp_path)]) == "2.12.1"
    assert lowest_torch() == "2.11"


def test_interpreters_are_found_by_version() -> None:
    assert interpreters.find("3.99") is None
    found = {version: interpreters.find(version) for version in interpreters.VERSIONS}
    assert any(found.values())
    for version, python in found.items():
        if python is not None:
            printed = subprocess.run([python, "--version"], capture_output=True, text=True).stdout
            assert printed.startswith(f"Python {version}.")


def test_matrix_ends_with_a_table() -> None:
    tried = matrix.Row("3.10", "2.11.0", {"torch": "passed", "build": "failed"}, build_s=31.6)
    missing = matrix.Row("3.99", "2.13.0")
    matrix.run(missing)
    assert [re.split(" {2,}", line) for line in matrix.table([tried, missing]).splitlines()] == [
        ["Python", "torch", *matrix.STEPS[1:], "build, s"],
        ["3.10", "2.11.0", "failed", *["not run"] * 5, "32"],
        ["3.99", "2.13.0", *["no such Python"] * 6, "0"],
    ]
    assert matrix.main(["3.99:2.13.0"]) == 1


def test_workflow_tries_the_versions_that_are_promised() -> None:
    path = ROOT / ".github" / "workflows" / "matrix.yml"
    (pythons,) = re.findall(r"^ +python: (\[.*\])$", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert tuple(ast.literal_eval(pythons)) == interpreters.VERSIONS


# A build that sees no packages but those of one folder.
REQUIRES = """
import sys
sys.path.insert(0, "distribution")
import fddp_build
find = fddp_build.installed_torch
fddp_build.installed_torch = lambda path: find([sys.argv[1]])
print(fddp_build.get_requires_for_build_wheel({"torch": sys.argv[2]} if sys.argv[2:] else None))
"""


def requires(*arguments: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("scikit_build_core")
    command = [sys.executable, "-c", REQUIRES, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_build_without_torch_is_refused(tmp_path: Path) -> None:
    done = requires(str(tmp_path))
    assert done.returncode == 1
    assert "Run `pip install 'torch>=2.11'` before `pip install .`" in done.stderr


def test_a_build_for_too_old_a_torch_is_refused(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.9.0'\n")
    done = requires(str(tmp_path))
    assert done.returncode == 1
    assert "torch 2.9.0 is installed, and fddp needs 2.11 or later" in done.stderr


def test_a_compiler_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for compiler in ("", sys.executable, f"{sys.executable} -E"):
        monkeypatch.setenv("CXX", compiler)
        _check_compiler()
    monkeypatch.setenv("CXX", "no-such-g++ -O2")
    with pytest.raises(SystemExit, match=r"^CXX names 'no-such-g\+\+', which is"):
        _check_compiler()


def test_a_build_for_a_named_torch_fetches_it(tmp_path: Path) -> None:
    done = requires(str(tmp_path), "2.13.0")
    assert done.returncode == 0, done.stderr
    assert "torch==2.13.0" in ast.literal_eval(done.stdout)
