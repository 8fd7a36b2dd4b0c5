"""The extension says which torch it was built for, and how to get one that fits."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch

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
