"""The documentation's examples run, and its lists name what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fddp
from fddp import errors
from tests.support.pages import GUIDE, PAGES, ROOT, alone, read, run_guide, run_sessions

ARCHITECTURE = read("docs/architecture.md")
GUIDE_TEXT = "".join(map(read, GUIDE))


@pytest.mark.parametrize("page", [page for page in PAGES if alone(page, "pycon")])
def test_sessions(page: str) -> None:
    for library in re.findall(r"^>>> import (\w+)", alone(page, "pycon"), re.MULTILINE):
        pytest.importorskip(library)
    failed, attempted = run_sessions(page)
    assert attempted
    assert not failed


@pytest.mark.nightly
def test_guide_runs_on_two_ranks(tmp_path: Path) -> None:
    run_guide(tmp_path)


def test_pages_of_the_guide_are_listed() -> None:
    """In the tests, and in the index."""
    files = {f"docs/guide/{path.name}" for path in (ROOT / "docs/guide").glob("*.md")}
    assert files == set(GUIDE)
    index = read(GUIDE[0])
    for page in GUIDE[1:]:
        assert f"]({Path(page).name})" in index


@pytest.mark.parametrize("page", PAGES)
def test_links_and_named_files_exist(page: str) -> None:
    """Paths in backticks are from the top of the project or of the package."""
    for target in re.findall(r"\]\(([^)\s]+)\)", read(page)):
        if "://" in target:
            continue
        file, _, heading = target.partition("#")
        path = (ROOT / page).parent / file if file else ROOT / page
        assert path.exists(), f"{page} links to {target}"
        if heading:
            assert heading in _anchors(path.read_text(encoding="utf-8")), f"{page}: {target}"
    for name in re.findall(r"`((?:[\w.]+/)+\w+\.(?:py|cpp|h|md))`", read(page)):
        places = [ROOT / name, ROOT / "fddp" / name]
        is_past = page == "CHANGELOG.md"
        assert is_past or any(place.exists() for place in places), f"{page} names {name}"


def _anchors(text: str) -> set[str]:
    """Of the headings, as code forges make them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return set(map(_anchor, headings))


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_durations_of_commands_are_on_pages_alone() -> None:
    """A comment of the Makefile would be another statement, and they would part."""
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if re.match(r"#.*\b(minutes?|hours?|seconds)\b", line)]
    pages = [read(page) for page in ("README.md", "CONTRIBUTING.md", "docs/install.md")]
    assert all(
        "half a minute on two idle" in " ".join(page.split()) for page in pages
    )  # to compile


def test_every_room_is_on_the_map() -> None:
    table = ARCHITECTURE.partition("## Rooms")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE)
    assert {room for row in rows for room in re.findall(r"`([^`]+)`", row)} == _rooms()


def _rooms() -> set[str]:
    """Rooms of the library: its folders, and the one module of names beside them."""
    folders = {path.parent.name for path in (ROOT / "fddp").glob("*/*") if path.is_file()}
    return {"errors.py", *(f"{name}/" for name in folders - {"__pycache__"})}


def test_every_note_is_listed() -> None:
    pattern = r"\[Note: ([\w ]+)\]"
    sources = [
        path.read_text(encoding="utf-8")
        for path in (ROOT / "fddp").rglob("*")
        if path.suffix in (".py", ".h", ".cpp")
    ]
    written = {name for source in sources for name in re.findall(pattern, source)}
    assert set(re.findall(pattern, ARCHITECTURE)) == written


def test_every_error_is_in_the_table() -> None:
    rows = set(re.findall(r"^\| `(\w+Error)`", GUIDE_TEXT, re.MULTILINE))
    kinds = {name for name in vars(errors) if name.endswith("Error")}
    assert kinds - rows == {"FddpError"}
    assert rows <= kinds
    assert "`FddpError`" in GUIDE_TEXT


def test_every_public_name_is_in_the_guide() -> None:
    assert not [name for name in fddp.__all__ if name not in GUIDE_TEXT]


def test_tests_named_on_the_faults_page_exist() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    rows = [line for line in read("docs/faults.md").splitlines() if line.startswith("| ")]
    promises = [row for row in rows if not row.startswith(("| Fault |", "| --- |"))]
    assert len(promises) > 40
    for row in promises:
        shown = re.findall(r"`(tests/[^`:]+|make [a-z]+)(?:::(\w+))?`", row.split("|")[-2])
        assert shown, row
        for where, name in shown:
            if where.startswith("make "):
                assert where.removeprefix("make ") in targets, row
            else:
                assert (ROOT / where).exists(), row
                assert not name or f"def {name}(" in read(where), row
