"""The extension says which torch it was built for, and how to get one that fits."""

import ast
import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fddp
from fddp.errors import ExtensionError
from fddp.native import extension

REBUILD = r"run `pip install \.` in fddp's source directory"


@pytest.fixture
def load():
    """`extension.load` as a fresh process would call it."""
    return extension.load.__wrapped__


def found_at(monkeypatch, library):
    spec = SimpleNamespace(origin=str(library))
    monkeypatch.setattr(extension, "find_spec", lambda name: spec)


def test_loads_once_and_knows_its_torch():
    assert extension.load() is extension.load()
    assert extension.load().torch_version == torch.__version__.split("+")[0]


def test_version_file_matches_the_library():
    library = importlib.util.find_spec("fddp._C").origin
    assert extension._torch_built_for(extension.Path(library)) == extension.load().torch_version


def test_another_torch_is_named_before_the_library_is_loaded(monkeypatch, tmp_path, load):
    (tmp_path / "_C.torch_version").write_text("2.11.0\n")
    found_at(monkeypatch, tmp_path / "_C.so")
    monkeypatch.setattr(extension, "import_module", lambda name: pytest.fail("loaded"))
    monkeypatch.setattr(torch, "__version__", "2.12.1+cu128")
    message = rf"built for torch 2\.11\.0, but torch 2\.12\.1 is installed: {REBUILD}"
    with pytest.raises(ExtensionError, match=message):
        load()


@pytest.mark.parametrize("origin", [None, SimpleNamespace(origin=None)])
def test_missing_library_names_the_build_command(monkeypatch, load, origin):
    monkeypatch.setattr(extension, "find_spec", lambda name: origin)
    with pytest.raises(ExtensionError, match=rf"fddp\._C is not built: {REBUILD}"):
        load()


def test_a_library_without_the_note_is_not_trusted(monkeypatch, tmp_path, load):
    found_at(monkeypatch, tmp_path / "_C.so")
    with pytest.raises(ExtensionError, match=rf"which torch .*_C\.so was built for .*: {REBUILD}"):
        load()


def test_a_library_that_does_not_load_keeps_the_cause(monkeypatch, load):
    def broken(name):
        raise ImportError("undefined symbol: at::gone")

    monkeypatch.setattr(extension, "import_module", broken)
    with pytest.raises(ExtensionError, match=rf"undefined symbol: at::gone\): {REBUILD}"):
        load()


STUB = Path(fddp.__file__).with_name("_C.pyi").read_text()


def stated(stub: str) -> dict[str, str]:
    """Bases, parameters with defaults, or the value of each name of a stub."""
    found = {}

    def visit(body, owner):
        for item in body:
            decorators = [ast.unparse(one) for one in getattr(item, "decorator_list", ())]
            if "type_check_only" in decorators:
                continue
            if isinstance(item, ast.ClassDef):
                found[item.name] = " ".join(ast.unparse(base) for base in item.bases)
                visit(item.body, f"{item.name}.")
            elif isinstance(item, ast.FunctionDef) and "property" in decorators:
                found[owner + item.name] = "read-only"
            elif isinstance(item, ast.FunctionDef):
                found[owner + item.name] = parameters(item)
            elif isinstance(item, ast.AnnAssign):
                value = "writable" if owner else "constant"
                found[owner + item.target.id] = ast.unparse(item.value) if item.value else value

    visit(ast.parse(stub).body, "")
    return found


def parameters(function):
    """Parameters of a function with their defaults, without types."""
    for parameter in function.args.args:
        parameter.annotation = None
    return ast.unparse(function.args)


def bound(module) -> dict[str, str]:
    """The same about a module made by pybind11, from the first lines of its docstrings."""
    found = {}

    def visit(namespace, owner):
        for name, value in namespace.items():
            value = getattr(value, "__func__", value)  # of static methods
            text = (getattr(value, "__doc__", None) or "").partition("\n")[0]
            if isinstance(value, type):
                bases = [base.__name__ for base in value.__bases__]
                found[name] = " ".join(base for base in bases if base != "pybind11_object")
                visit(vars(value), f"{name}.")
            elif isinstance(value, property):
                found[owner + name] = "writable" if value.fset else "read-only"
            elif text.startswith(f"{name}("):
                # A default that is no literal, as of an object of C++, is in angle brackets.
                (function,) = ast.parse(f"def {re.sub('<.*?>', '...', text)}: ...").body
                found[owner + name] = parameters(function)
            elif not owner and not name.startswith("__"):
                found[name] = str(value) if isinstance(value, int) else "constant"

    visit(vars(module), "")
    return found


def test_the_stub_has_the_names_and_parameters_of_the_extension():
    assert stated(STUB) == bound(extension.load())


@pytest.mark.parametrize(
    ("name", "text", "changed"),
    [
        ("Layout.__init__", "strides: Sequence", "pitches: Sequence"),
        ("ShmBackend.start", "wait_soon: bool = False", "wait_soon: bool = True"),
        ("LiveViews.add", "buffer: Tensor) -> None", "buffer: Tensor, key: str) -> None"),
        ("LeafSet", "class LeafSet(GradientCounter)", "class LeafSet"),
        ("leave_open_groups", "def leave_open_groups()", "def leave_open()"),
        ("BackwardWatch.reports_local", "def reports_local", "def reports_all"),
        ("SHM_LOST", "SHM_LOST: Final = 2", "SHM_LOST: Final = 3"),
    ],
)
def test_a_stub_that_differs_is_found(name, text, changed):
    assert STUB.count(text) >= 1
    module = bound(extension.load())
    found = stated(STUB.replace(text, changed))
    assert found.get(name) != module[name]
