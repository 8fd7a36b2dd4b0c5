"""Copy of a checkout in which mutants are applied, one after the other."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from tests.mutants.catalogue import MUTANTS, ROOT, Mutant

_TEST_S = 300.0  # for all tests of a mutant
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
}
_ARGUMENTS = ("-x", "-q", "-p", "no:cacheprovider", "-rfE")
_OF_FILES = ("--timeout", "120")
_OF_TESTS = ("--timeout", "290", "-m", "")  # also those of `make nightly`
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", re.MULTILINE)


class Verdict(NamedTuple):
    """What became of a mutant: "killed" by the test that failed, "survived", or "an error" of the
    list: it does not apply, or not build."""

    state: str
    by: str
    took_s: float


class Workshop:
    """A copy of the tracked files, with an environment over the packages of the checkout's."""

    def __init__(self, folder: Path) -> None:
        self._tree, self._build = folder / "tree", folder / "build"
        self._passing: set[tuple[str, ...]] = set()  # tests that pass in the unchanged copy
        for name in filter(None, _run(("git", "ls-files", "-z")).split("\0")):
            if (ROOT / name).is_file():
                target = self._tree / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes((ROOT / name).read_bytes())
        self._bin = ROOT / ".venv/bin"
        self._python = folder / "venv/bin/python"
        base = self._bin / "python"
        _run((base, "-m", "venv", "--without-pip", folder / "venv"))
        paths = _run((base, "-c", "import sys; print(*sys.path, sep='\\n')")).splitlines()
        paths = [str(self._tree), *(path for path in paths if path not in ("", str(ROOT)))]
        (packages,) = (folder / "venv/lib").glob("python*/site-packages")
        (packages / "mutants.pth").write_text("\n".join(paths) + "\n")
        script = "import importlib.util as u; print(u.find_spec('fddp._C').origin)"
        self._extension = Path(_run((base, "-c", script)).strip())
        self._install(self._extension)
        self._nursery: Any = subprocess.Popen(
            [self._python, Path(__file__).with_name("nursery.py"), str(_TEST_S)],
            cwd=self._tree,
            env={**os.environ, **_ENVIRONMENT},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def judge(self, mutant: Mutant) -> Verdict:
        """Apply a mutant, run its tests, and restore the file. The tests must pass without it."""
        start_s = time.perf_counter()
        state, by = "an error", mutant.problem(self._tree) or self._failing_without(mutant.tests)
        if not by:
            path = self._tree / mutant.file
            text = path.read_text()
            path.write_text(text.replace(mutant.old, mutant.new))
            try:
                by = self.build() if mutant.is_cpp else ""
                if not by:
                    by = self._failing_test(mutant.tests)
                    state = "killed" if by else "survived"
            finally:
                path.write_text(text)
                if mutant.is_cpp:
                    self._install(self._extension)
        return Verdict(state, by, time.perf_counter() - start_s)

    def build(self) -> str:
        """Build the extension incrementally; return the error, if there is one."""
        environment = {"PATH": f"{self._bin.resolve()}:{os.environ['PATH']}"}
        environment |= {"CCACHE_BASEDIR": str(self._tree.parent), "CCACHE_NOHASHDIR": "1"}
        cmake = self._bin / "cmake"
        try:
            if not (self._build / "build.ninja").exists():
                # Files with mutants are compiled alone, so that the others are compiled once.
                names = {str(self._tree / mutant.file) for mutant in MUTANTS if mutant.is_cpp}
                alone = f"{' '.join(sorted(names))} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON"
                with (self._tree / "fddp/csrc/CMakeLists.txt").open("a") as file:
                    file.write(f"set_source_files_properties({alone})\n")
                options = ("-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release")
                places = ("-S", self._tree / "fddp/csrc", "-B", self._build)
                command = (cmake, *places, *options, f"-DPython_EXECUTABLE={self._python}")
                _run(command, environment)
            _run((cmake, "--build", self._build, "-j", "1"), environment)
        except subprocess.CalledProcessError as error:
            return f"it does not build: {error.stdout[-2000:]}"
        for built in self._build.glob("_C*.so"):
            self._install(built)
        return ""

    def _install(self, built: Path) -> None:
        target = self._tree / "fddp" / built.name
        target.unlink(missing_ok=True)  # another process may have it mapped
        target.write_bytes(built.read_bytes())
        note = built.with_name("_C.torch_version")
        target.with_name(note.name).write_bytes(note.read_bytes())

    def _failing_test(self, tests: Sequence[str]) -> str:
        """Return the first test that fails; "" if all pass."""
        commands: IO[str] = self._nursery.stdin
        further = _OF_TESTS if any("::" in test for test in tests) else _OF_FILES
        print(json.dumps([*_ARGUMENTS, *further, *tests]), file=commands, flush=True)
        status, output = json.loads(self._nursery.stdout.readline())
        found = _FAILED.search(output)
        return "" if status == 0 else found[1] if found else f"pytest ended with {status}"

    def _failing_without(self, tests: tuple[str, ...]) -> str:
        """Return why the tests can't judge: one that fails in the unchanged copy; "" if none."""
        if tests not in self._passing:
            if by := self._failing_test(tests):
                return f"{by} fails without the mutant"
            self._passing.add(tests)
        return ""

    def close(self) -> None:
        """End the process that runs tests."""
        self._nursery.stdin.close()
        self._nursery.wait()


def _run(command: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> str:
    """Run a command in the checkout, and return what it wrote."""
    both = {**os.environ, **(environment or {})}
    pipe = subprocess.PIPE
    done = subprocess.run(command, cwd=ROOT, env=both, stdout=pipe, text=True, check=True)
    return done.stdout
