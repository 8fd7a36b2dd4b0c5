"""The code on pages of the documentation: found, kept at its line, run.

What a fence is called decides what its block is: "python" is part of the page's script, which runs
on two ranks; "pycon" is a session with results, which runs in one process; "console" holds shell
commands. Blocks of a page go on from one another.
"""

from __future__ import annotations

import doctest
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.programs import ROOT, torchrun

#: The guide, in the order of its pages. The first begins the script that each other page continues,
#: and the last closes what the first opened.
GUIDE = tuple(
    f"docs/guide/{name}.md"
    for name in (
        "index",
        "start",
        "ladder",
        "choosing",
        "recipes",
        "steps",
        "batches",
        "leaves",
        "virtual",
        "hooks",
        "step_information",
        "plans",
        "own_schedules",
        "meshes",
        "simulation",
        "replicas",
        "few_bytes",
        "operators",
        "replication",
        "testing",
        "transports",
        "errors",
    )
)
PAGES = (
    "README.md",
    "docs/install.md",
    *GUIDE,
    "docs/glossary.md",
    "docs/dependencies.md",
    "docs/ddp.md",
    "docs/backend.md",
    "docs/compile.md",
    "docs/coming_from.md",
    "docs/examples.md",
    "docs/going_on.md",
    "docs/watching.md",
    "docs/faults.md",
    "docs/determinism.md",
    "docs/jax.md",
    "docs/integrations.md",
    "docs/architecture.md",
    "docs/performance.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
)

_FENCE = re.compile(r"^```([\w{}-]*)$")
_OPTIONS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


class Block(NamedTuple):
    """A fenced block.

    Attributes:
        language: the name on its fence.
        line: number of its first line on the page, from 1.
        lines: its text.
    """

    language: str
    line: int
    lines: tuple[str, ...]


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> Iterator[Block]:
    """All fenced blocks, in order."""
    language, start = "", 0
    lines: list[str] | None = None
    for number, line in enumerate(read(page).splitlines(), start=1):
        fence = _FENCE.match(line)
        if lines is None and fence:
            language, start, lines = fence[1], number + 1, []
        elif lines is not None and fence:
            yield Block(language, start, tuple(lines))
            lines = None
        elif lines is not None:
            lines.append(line)
    assert lines is None, f"{page}: the fence before line {start} has no end"


def commands(page: str) -> list[str]:
    """The shell commands, without comments."""
    return [
        command
        for block in blocks(page)
        if block.language == "console"
        for line in block.lines
        if (command := line.partition(" #")[0].strip())
    ]


def alone(page: str, language: str) -> str:
    """The page with all but one language's blocks blanked, so that lines keep their number."""
    kept: dict[int, str] = {}
    for block in blocks(page):
        if block.language == language:
            kept.update(enumerate(block.lines, start=block.line))
    last = max(kept, default=0)
    return "".join(f"{kept.get(number, '')}\n" for number in range(1, last + 1))


def run_sessions(page: str) -> doctest.TestResults:
    """Runs the "pycon" blocks."""
    text = alone(page, "pycon")
    session = doctest.DocTestParser().get_doctest(text, {}, page, str(ROOT / page), 0)
    return doctest.DocTestRunner(optionflags=_OPTIONS).run(session)


_GUIDE_DRIVER = """
import sys
from hypothesis import HealthCheck, settings

settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")
first, *others = sys.argv[1:]
shared = {"__name__": "__main__"}
exec(compile(open(first).read(), first, "exec"), shared)
for page in others:
    exec(compile(open(page).read(), page, "exec"), dict(shared))
"""


def run_guide(folder: Path) -> None:
    """Runs the "python" blocks of each page of the guide, after those of its first, on two ranks.

    A page sees no names of another, except of the first.
    """
    scripts = []
    for page in GUIDE:
        code = alone(page, "python")
        if code.strip():
            scripts.append(f"{Path(page).stem}_page.py")
            (folder / scripts[-1]).write_text(code, encoding="utf-8")
    (folder / "guide.py").write_text(_GUIDE_DRIVER, encoding="utf-8")
    torchrun("guide.py", *scripts, cwd=folder)


def run_script(page: str, folder: Path, *, epilogue: str = "") -> None:
    """Runs the "python" blocks, at their lines, under torchrun on two ranks, in `folder`.

    Args:
        page: whose blocks.
        folder: an empty one; gets the script.
        epilogue: code to run after the page's, with its variables.
    """
    script = folder / f"{Path(page).stem}_page.py"  # "jax.py" would be imported in JAX's place
    script.write_text(alone(page, "python") + epilogue, encoding="utf-8")
    torchrun(script.name, cwd=folder)
