"""`install` puts fddp's class in the place of torch's, says so, and puts torch's back."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator

import pytest
import torch

import fddp
from fddp.integrations import install

STOCK = torch.nn.parallel.distributed.DistributedDataParallel
FRAMEWORKS = ("accelerate", "ignite", "lightning", "pytorch_lightning", "transformers")


def test_a_line_on_rank_0(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        with _ignored(), install():
            assert torch.nn.parallel.DistributedDataParallel is fddp.DistributedDataParallel
        assert torch.nn.parallel.DistributedDataParallel is STOCK
        assert capsys.readouterr().err.count("is now fddp's\n") == lines


def test_close_puts_the_earlier_class_back() -> None:
    outer = install(quiet=True)
    install(quiet=True).close()
    assert torch.nn.parallel.DistributedDataParallel is fddp.DistributedDataParallel
    outer.close()
    assert torch.nn.parallel.DistributedDataParallel is STOCK


def test_modules_that_keep_torchs_class_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    early = types.ModuleType("some_framework.ddp")
    early.DDP = STOCK  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, early.__name__, early)
    with pytest.warns(UserWarning, match=r"some_framework\.ddp.* call install\(\) first"):
        install().close()


def test_no_framework_is_imported() -> None:
    program = f"import sys, fddp.integrations; print([n for n in {FRAMEWORKS} if n in sys.modules])"
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert printed.stdout == "[]\n"


@contextlib.contextmanager
def _ignored() -> Iterator[None]:
    """Other test modules have imported torch's class."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
