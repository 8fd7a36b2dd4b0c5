"""Configuration of the documentation site, built by `make docs` with Sphinx.

The source folder is the top of the project, so that links between pages, notebooks and code are the
same on the site as in the repository.
"""

from __future__ import annotations

import re
from importlib.metadata import version as _version_of
from pathlib import Path
from typing import Any

project = "fddp"
author = copyright = "fddp contributors"
version = release = _version_of("fddp")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
root_doc = "docs/index"
include_patterns = ["docs/**", "notebooks/*.ipynb", "CONTRIBUTING.md", "CHANGELOG.md"]

html_theme = "furo"
html_css_files = ["site.css"]
html_static_path = ["_static"]
html_search_scorer = str(Path(__file__).parent / "_static/scorer.js")
html_title = f"fddp {release}"
html_theme_options = {"navigation_with_keys": True}
html_copy_source = False
html_show_sourcelink = False

myst_heading_anchors = 3
myst_enable_extensions = ["attrs_inline"]
nb_execution_mode = "off"  # outputs are those that the notebooks keep
nb_merge_streams = True

autodoc_class_signature = "mixed"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
default_role = "py:obj"  # a link where the name is documented, and code elsewhere
napoleon_google_docstring = True
napoleon_use_ivar = True
napoleon_custom_sections = [
    ("Args of a call", "params_style"),
    ("Returns of a call", "returns_style"),
    ("Raises of a call", "params_style"),
]
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True


def _docstring(app: Any, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    """Rewrite what is plain text in the source, and markup in reStructuredText."""
    text = "\n".join(lines)
    text = re.sub(r"(?<![`\w])\*(?=[\w*(])", r"\\*", text)  # *args
    text = re.sub(r"(`[^`\s]+`)(?=s\b)", r"\1\\ ", text)  # a plural of a name
    text = re.sub(r"(?<![`\w])(\w+)_(?![\w`])", r"\1\\_", text)  # names that end in _
    lines[:] = text.split("\n")


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", _docstring, priority=400)
