"""Mutants of the product, read from the files `*.mutants` beside this one.

A line `@ FILE` starts the mutants of a file, and `# NAME TEST ...` one of them, with the tests that
kill it. Lines with `-` are a text that occurs once in the file, and lines with `+` the text in its
place. Lines with `%` are remarks. A test without a slash is a scenario on the device that lags,
with the delays of 20 seeds.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SCENARIO = "tests/lag/test_steps.py::test_with_other_delays[{}]"


class Mutant(NamedTuple):
    """One change of one file, which breaks a law that some test must hold.

    Attributes:
        name: name of the mutant, unique.
        file: path of the changed file in the repository.
        old: text that occurs once in the file.
        new: text in its place.
        tests: test files, or tests, of which one must fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def is_cpp(self) -> bool:
        """True if the extension has to be built again."""
        return not self.file.endswith(".py")

    def problem(self, tree: Path = ROOT) -> str:
        """Why the mutant does not apply to a checkout; "" if it does."""
        path = tree / self.file
        count = path.read_text().count(self.old) if path.exists() else 0
        if count != 1 or self.old == self.new:
            return f"the text occurs {count} times in {self.file}"
        gone = [test for test in self.tests if not (tree / test.partition("::")[0]).exists()]
        return f"no test {gone[0]}" if gone else "" if self.tests else "it names no test"


def read(text: str) -> Iterator[Mutant]:
    """Yield the mutants of a file of this format.

    >>> [*read("@ a.py\\n# first tests/test_a.py\\n-if x:\\n+if True:\\n")]
    [Mutant(name='first', file='a.py', old='if x:', new='if True:', tests=('tests/test_a.py',))]
    """
    file = name = ""
    tests: list[str] = []
    lines: dict[str, list[str]] = {"-": [], "+": []}
    for mark, rest in ((line[0], line[1:]) for line in [*text.splitlines(), "@"] if line):
        if mark in lines:
            lines[mark].append(rest)
        elif mark in "@#":
            if name:
                yield Mutant(name, file, *("\n".join(lines[m]) for m in "-+"), tuple(tests))
            name, lines = "", {"-": [], "+": []}
            if mark == "#":
                name, *tests = rest.split()
                tests = [test if "/" in test else SCENARIO.format(test) for test in tests]
            else:
                file = rest.strip()


MUTANTS = tuple(
    mutant
    for path in sorted(Path(__file__).parent.glob("*.mutants"))
    for mutant in read(path.read_text())
)
