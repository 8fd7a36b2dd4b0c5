"""The ranking of the site's search: Sphinx's searchtools.js with docs/_static/scorer.js, in Python.

Left out: words that a query excludes by `-`. Partial matches compare text, where searchtools.js
takes the word as a pattern.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from sphinx.search.en import SearchEnglish

_TITLE, _PARTIAL_TITLE, _TERM, _PARTIAL_TERM = 15, 7, 5, 2
_WHOLE_QUERY = 20  # added by docs/_static/scorer.js
_OBJECT, _PARTIAL_OBJECT = 11, 6
_OBJECT_PRIORITIES = {0: 15, 1: 5, 2: -5}


class Found(NamedTuple):
    """One result: a page, or with an anchor a section or an object of it."""

    page: str
    anchor: str
    title: str
    score: int


class SiteSearch:
    """The search of a site that was built.

    Args:
        site: folder of the site.
    """

    def __init__(self, site: Path) -> None:
        text = (site / "searchindex.js").read_text("utf-8")
        self.index: dict[str, Any] = json.loads(
            text.removeprefix("Search.setIndex(").removesuffix(")")
        )
        self._language = SearchEnglish({})

    def __call__(self, query: str) -> list[Found]:
        """Return the results for a query, best first."""
        query = query.strip()
        words = re.findall(r"\w+", query.lower())
        found = [*self._titles(query.lower())]
        for word in dict.fromkeys(words):
            found += self._objects(word, {*words} - {word})
        found += self._texts(words)
        entries = [*self._entries(query.lower())]
        found += [entry for is_main, entry in entries if is_main]
        last = [entry for is_main, entry in entries if not is_main]
        kept: dict[tuple[str, ...], Found] = {}
        for group in (found, last):
            group.reverse()  # of equal ones the last is shown first
            for one in sorted(group, key=_order):
                kept.setdefault(one[:3], one)
        return [*kept.values()]

    def _entries(self, query: str) -> Iterator[tuple[bool, Found]]:
        """Entries of the index, and whether each is a main one: all others come last."""
        for entry, places in self.index["indexentries"].items():
            if query in entry and len(query) >= len(entry) / 2:
                for file, anchor, is_main in places:
                    score = int(100 * len(query) / len(entry) + 0.5)
                    names = self.index["docnames"], self.index["titles"]
                    yield bool(is_main), Found(names[0][file], anchor, names[1][file], score)

    def _titles(self, query: str) -> Iterator[Found]:
        index = self.index
        for title, places in index["alltitles"].items():
            if query not in title.lower().strip() or len(query) < len(title) / 2:
                continue
            for file, anchor in places:
                of_page = index["titles"][file]
                score = (
                    int(_TITLE * len(query) / len(title) + 0.5) + (of_page == title) + _WHOLE_QUERY
                )
                shown = title if of_page == title else f"{of_page} > {title}"
                yield Found(index["docnames"][file], anchor or "", shown, score)

    def _objects(self, word: str, others: set[str]) -> Iterator[Found]:
        index = self.index
        for prefix, entries in index["objects"].items():
            for file, kind, priority, anchor, name in entries:
                full = f"{prefix}.{name}" if prefix else name
                last = full.lower().split(".")[-1]
                kind_name = index["objnames"][str(kind)][2]
                around = f"{prefix} {name} {kind_name} {index['titles'][file]}".lower()
                if word not in full.lower() or any(other not in around for other in others):
                    continue
                score = _OBJECT_PRIORITIES.get(priority, 0)
                if word in (full.lower(), last):
                    score += _OBJECT
                elif word in last:
                    score += _PARTIAL_OBJECT
                yield Found(index["docnames"][file], anchor or full, full, score)

    def _texts(self, words: list[str]) -> Iterator[Found]:
        """Pages with all words."""
        stop = self._language.stopwords
        stems = dict.fromkeys(
            self._language.stem(word) for word in words if word not in stop and not word.isdigit()
        )
        scores: dict[int, dict[str, int]] = {}
        for stem in stems:
            for file, score in self._files(stem):
                scores.setdefault(file, {})[stem] = score
        enough = {len(stems), sum(len(stem) > 2 for stem in stems)}
        for file, by_stem in scores.items():
            if len(by_stem) in enough:
                names = self.index["docnames"], self.index["titles"]
                yield Found(names[0][file], "", names[1][file], max(by_stem.values()))

    def _files(self, stem: str) -> Iterator[tuple[int, int]]:
        """Pages with a stem and the score of each; a later one replaces an earlier one."""
        tables = (
            (self.index["terms"], _TERM, _PARTIAL_TERM),
            (
                self.index["titleterms"],
                _TITLE,
                _PARTIAL_TITLE,
            ),
        )
        for table, score, _ in tables:
            yield from ((file, score) for file in _list(table.get(stem, [])))
        for table, _, partial in tables:
            if len(stem) > 2 and stem not in table:
                for term, files in table.items():
                    if stem in term:
                        yield from ((file, partial) for file in _list(files))


def _list(files: int | list[int]) -> list[int]:
    return [files] if isinstance(files, int) else files


def _order(one: Found) -> tuple[int, str]:
    return -one.score, one.title.lower()
