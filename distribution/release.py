"""Source tree of a distribution: the files of an sdist, with the changes that a release needs.

A wheel has machine code for one torch. So its version ends in that torch, as in 0.1.0+torch2.13.0,
and it requires exactly that one. On the page of an index, links relative to the repository lead
nowhere: they become absolute if pyproject.toml names a repository, and plain text otherwise.
"""

from __future__ import annotations

import re
from pathlib import Path

# A link that is neither absolute nor a heading of the same page.
_RELATIVE = re.compile(r"\[([^\]]+)\]\((?!\w+:)([^)#\s][^)\s]*)\)")


def prepare(tree: Path, torch: str | None = None) -> None:
    """Change an unpacked sdist in place.

    Args:
        tree: folder with pyproject.toml and README.md.
        torch: version that wheels of it are built against; None for sources.
    """
    project, readme = tree / "pyproject.toml", tree / "README.md"
    text = project.read_text(encoding="utf-8")
    page = readme.read_text(encoding="utf-8")
    readme.write_text(absolute_links(page, repository(text)), encoding="utf-8")
    if torch is not None:
        project.write_text(pinned(text, torch), encoding="utf-8")


def repository(project: str) -> str | None:
    """Address of the repository in the text of pyproject.toml. None if it has none."""
    found = re.search(r'^Repository = "([^"]+)"$', project, re.MULTILINE)
    return found[1].rstrip("/") if found else None


def absolute_links(page: str, address: str | None) -> str:
    """Replace relative links by absolute ones, or by their text if there is no address."""
    target = rf"[\1]({address}/blob/HEAD/\2)" if address else r"\1"
    return _RELATIVE.sub(target, page)


def pinned(project: str, torch: str) -> str:
    """Text of pyproject.toml with the version and the requirement of a wheel for this torch."""
    labelled = re.sub(r'^(version = "[^"+]+)"$', rf'\1+torch{torch}"', project, flags=re.MULTILINE)
    exact = re.sub(r'"torch>=[\d.]+"', f'"torch=={torch}"', labelled)
    if labelled == project or exact == labelled:
        raise ValueError("pyproject.toml has no line with the version, or none that requires torch")
    return exact
