"""The documentation site builds without a warning, and its reference has every public name."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

import fddp
import fddp.jax
import fddp.testing
import fddp.viz
from fddp import averaging, errors, hooks
from tests.support.pages import ROOT, read
from tests.support.programs import run_python
from tests.support.site_search import SiteSearch

REFERENCE = sorted((ROOT / "docs/reference").glob("*.md"))
DIRECTIVE = re.compile(r"^\.\. auto\w+:: (fddp\.[\w.]+)$", re.MULTILINE)
DOCUMENTED = [name for path in REFERENCE for name in DIRECTIVE.findall(path.read_text("utf-8"))]


def _public(module: ModuleType) -> set[str]:
    """The names that a module lists, or those that its package exports."""
    names = getattr(module, "__all__", None)
    if names is None:
        names = [name for name in vars(module) if not name.startswith("_")]
    found = {name: getattr(module, name) for name in names}
    return {
        name
        for name, value in found.items()
        if not isinstance(value, ModuleType) and _is_ours(value)
        if name != "HookError" or module is errors  # `hooks` has it, too
    }


def _is_ours(value: object) -> bool:
    kind = value if isinstance(value, type) or callable(value) else type(value)
    home = getattr(kind, "__module__", "fddp")
    return home.startswith("fddp") or isinstance(value, dict)


@pytest.mark.parametrize(
    ("module", "prefix"),
    [
        (fddp, "fddp"),
        (errors, "fddp.errors"),
        (hooks, "fddp.hooks"),
        (fddp.testing, "fddp.testing"),
        (fddp.viz, "fddp.viz"),
        (fddp.jax, "fddp.jax"),
        (fddp.periodic, "fddp.periodic"),
        (fddp.numerics, "fddp.numerics"),
        (fddp.watch, "fddp.watch"),
        (fddp.extend, "fddp.extend"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_public_name_is_in_the_reference(module: ModuleType, prefix: str) -> None:
    names = {f"{prefix}.{name}" for name in _public(module)}
    assert names
    # The same as fddp.loopback, fddp.averaging.Periodic and those of fddp.jax.
    elsewhere = {"fddp.testing.loopback", "fddp.periodic.Periodic"}
    elsewhere |= {"fddp.extend.to_array", "fddp.extend.to_tensor"}
    assert not names - set(DOCUMENTED) - elsewhere


def test_the_index_of_the_reference_has_every_page() -> None:
    index = read("docs/reference/index.md")
    pages = {path.name for path in (ROOT / "docs/reference").glob("*.md")} - {"index.md"}
    assert set(re.findall(r"^\| \[[^\]]*\]\((\w+\.md)\)", index, re.MULTILINE)) == pages


def test_averaging_is_in_the_reference() -> None:
    for name in ("Periodic", "Averager", "average"):
        assert hasattr(averaging, name)
        assert f"fddp.averaging.{name}" in DOCUMENTED


def test_no_name_is_documented_twice() -> None:
    assert len(DOCUMENTED) == len(set(DOCUMENTED))


#: queries of users of DDP, and the page or section meant: it is among the first three results
SEARCHED = {
    "autocast": "docs/guide/recipes",
    "mixed precision": "docs/guide/recipes#mixed-precision-with-autocast",
    "SyncBatchNorm": "docs/guide/recipes#syncbatchnorm",
    "gradient clipping": "docs/guide/recipes",
    "gradient accumulation": "docs/guide/recipes#gradient-accumulation",
    "learning rate": "docs/guide/recipes",
    "DistributedSampler": "docs/guide/recipes#distributedsampler",
    "EMA": "docs/guide/recipes",
    "slurm": "docs/guide/recipes#slurm",
    "horovod": "docs/coming_from#from-horovod",
    "deepspeed": "docs/coming_from#from-deepspeed",
    "custom schedule": "docs/guide/own_schedules",
    "slow rank": "docs/watching",
    "straggler": "docs/watching",
    "timeout": "docs/guide/recipes#timeouts",
    "torch.compile": "docs/compile",
    "checkpoint": "docs/guide/recipes#resume-a-checkpoint",
    "resume": "docs/guide/recipes",
    "no_sync": "docs/ddp",
    "unused parameters": "docs/guide/leaves#unused-parameters",
    "NaN": "docs/guide/step_information",
    "uneven inputs": "docs/guide/batches#uneven-inputs",
    "join": "docs/reference/wrapper#fddp.DistributedDataParallel.join",
    "bucket size": "docs/guide/plans#bucket-sizes-and-plans",
    "compression": "docs/guide/hooks#compression",
    "gloo": "docs/guide/transports",
    "nccl": "docs/guide/transports",
    "freeze": "docs/guide/recipes",
    "sparse": "docs/guide/leaves",
    "fp16": "docs/reference/hooks#fddp.hooks.fp16_compress",
    "elastic": "docs/going_on",
    "tensorboard": "docs/watching",
    "shared memory": "docs/backend",
}


def test_every_page_is_in_the_navigation() -> None:
    """Once, and the sidebar has 25 entries in four groups. Notebooks are found by a pattern."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    listed = [entry for page in pages for entry in _navigation(page)]
    assert len(listed) == len(set(listed))
    wanted = {path for path in pages if path != ROOT / "docs/index.md"}
    wanted |= {ROOT / name for name in ("notebooks/*", "CONTRIBUTING.md", "CHANGELOG.md")}
    assert set(listed) == wanted
    index = read("docs/index.md")
    groups = re.findall(r"^:caption: (\w+)$", index, re.MULTILINE)
    assert groups == ["Start", "Tasks", "Concepts", "Reference"]
    assert len(_navigation(ROOT / "docs/index.md")) <= 25


def _navigation(page: Path) -> list[Path]:
    """Files that the page lists below itself."""
    lists = re.findall(r"```\{toctree\}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    names = [line for block in lists for line in block.splitlines() if line[:1] not in (":", "")]
    return [
        (page.parent / (name if name.endswith("*") else f"{name}.md")).resolve() for name in names
    ]


@pytest.mark.nightly
def test_the_site_builds_and_its_search_finds_what_is_meant(tmp_path: Path) -> None:
    """The ranking is that of the search page, but for what `SiteSearch` leaves out.

    Summaries, which the page adds after it has ranked, are left out.
    """
    pytest.importorskip("furo", reason="pip install fddp[docs]")
    strict = ["--fail-on-warning", "--keep-going", "--quiet", "--jobs", "2"]
    run_python("-m", "sphinx", *strict, "-c", "docs", ".", str(tmp_path))
    assert (tmp_path / "docs/index.html").exists()
    assert "open build/docs/docs/index.html" in read("Makefile")
    gradients = (tmp_path / "docs/reference/gradients.html").read_text("utf-8")
    assert 'id="fddp.GradSync.value_and_grad"' in gradients
    search = SiteSearch(tmp_path)
    assert {"docs/glossary", "notebooks/02_schedules"} <= set(search.index["docnames"])
    missed = {}
    for query, wanted in SEARCHED.items():
        first = [f"{one.page}#{one.anchor}".rstrip("#") for one in search(query)[:3]]
        if wanted not in first:
            missed[query] = first
    assert not missed
    assert not search("nothing has thiswordinit")
    if shutil.which("node") is not None:  # the scripts of the page themselves
        command, queries = ["node", "-e", NODE, str(tmp_path)], json.dumps([*SEARCHED])
        done = subprocess.run(command, input=queries, capture_output=True, text=True, check=True)
        ours = {query: [*map(list, search(query))] for query in SEARCHED}
        assert json.loads(done.stdout) == ours


#: runs the scripts of the search page, without a page
NODE = """
const fs = require("fs"), vm = require("vm"), site = process.argv[1];
const document = { readyState: "loading", addEventListener() {}, getElementById: () => ({}),
  documentElement: { dataset: {} } };
const page = { document, _: (text) => text, DOCUMENTATION_OPTIONS: {}, _ready() {},
  SPHINX_HIGHLIGHT_ENABLED: false };
page.window = page;
vm.createContext(page);
const run = (text) => vm.runInContext(text, page);
const read = (name) => fs.readFileSync(`${site}/${name}`, "utf8");
run(read("_static/language_data.js"));
run(read("_static/searchtools.js").replace("const Search = {", "var Search = {"));
run(read("searchindex.js").replace("Search.setIndex(", "Search._index = ("));
const found = {};
for (const query of JSON.parse(fs.readFileSync(0, "utf8"))) {
  page.query = query;
  const results = run("Search._performSearch(...Search._parseQuery(query)).reverse()");
  found[query] = results.map((one) => [one[0], one[2].replace("#", ""), one[1], one[4]]);
}
console.log(JSON.stringify(found));
"""


@pytest.mark.nightly
def test_the_picture_of_the_readme_is_recorded(tmp_path: Path) -> None:
    """The script runs, and its picture has the parts of the one that is kept."""
    out = tmp_path / "timelines.svg"
    run_python("docs/images/timelines.py", str(out), "--steps", "2", "--width", "256")
    recorded, kept = out.read_text("utf-8"), read("docs/images/timelines.svg")
    for svg in (recorded, kept):
        assert ElementTree.fromstring(svg).tag.endswith("svg")
        shown = re.findall(r">([^<>]+)</text>", svg)
        titles = [text for text in shown if text.endswith(" ms after backward")]
        assert [title.partition(":")[0] for title in titles] == [
            "torch DDP over gloo",
            "fddp over shared memory",
        ]
        assert {"backward", "all-reduces", "launch", "after backward", "0"} <= set(shown)
