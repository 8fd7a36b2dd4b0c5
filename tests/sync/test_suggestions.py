"""Misspelt names: errors suggest the one that was meant."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fddp
from fddp.core.text import suggestion

TREE = {"a": torch.ones(2)}
PLAN = fddp.plan_buckets(TREE)


def sync(**options: Any) -> Any:
    return fddp.loopback(1, lambda group: fddp.GradSync(TREE, group=group, **options))


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "keyword of GradSync": (lambda: sync(bucket_cap=1), "'bucket_cap_mb'"),
    "keyword of plan_buckets": (
        lambda: fddp.plan_buckets(TREE, first_bucket=1),  # type: ignore[call-arg]
        "'first_bucket_mb'",
    ),
    "keyword of make_schedule": (
        lambda: fddp.make_schedule(PLAN, 2, algoritm="all_reduce"),  # type: ignore[call-arg]
        "'algorithm'",
    ),
    "algorithm": (lambda: sync(algorithm="herarchical"), "'hierarchical'"),
    "algorithm of a schedule": (
        lambda: fddp.make_schedule(PLAN, 2, algorithm="allreduce"),  # type: ignore[arg-type]
        "'all_reduce'",
    ),
    "policy": (lambda: sync(nonfinite="Skip"), "'skip'"),
    "preset": (
        lambda: fddp.simulate(fddp.make_schedule(PLAN, 2), "ethernet-10", {"a": 1.0}),
        "'ethernet-10g'",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_an_error_suggests_what_was_meant(case: str) -> None:
    call, wanted = CASES[case]
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    assert str(caught.value).endswith(f"; did you mean {wanted}?")


def test_a_lookup_of_a_preset_suggests_what_was_meant() -> None:
    with pytest.raises(KeyError) as caught:
        fddp.PRESETS["ethernet-10"]
    (text,) = caught.value.args
    assert text == "there is no preset 'ethernet-10'; did you mean 'ethernet-10g'?"
    with pytest.raises(KeyError, match=r"there is no preset 'zz'\"$"):
        fddp.PRESETS["zz"]
    assert "zz" not in fddp.PRESETS
    assert fddp.PRESETS.get("zz") is None


def test_words_that_resemble_none_get_no_suggestion() -> None:
    assert suggestion("zz", ["ring", "tree"]) == ""
    assert suggestion(3, ["ring", "tree"]) == ""
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'zz'$"):
        fddp.plan_buckets(TREE, zz=1)  # type: ignore[call-arg]


def test_functions_that_suggest_keywords_stay_themselves() -> None:
    for function in (fddp.plan_buckets, fddp.make_schedule):
        assert pickle.loads(pickle.dumps(function)) is function
        assert (function.__doc__ or "").count("Args:") == 1


@pytest.mark.slow
def test_python_suggests_attributes() -> None:
    """In a traceback, for names of the package and of its modules."""
    code = """
import fddp, sys
try:
    fddp.gradsync
except AttributeError:
    sys.excepthook(*sys.exc_info())
fddp.hooks.fp16_compres
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    for meant in ("GradSync", "fp16_compress"):
        assert done.stderr.count(f"Did you mean: '{meant}'?") == 1


def test_a_number_in_a_tree_is_to_be_a_tensor() -> None:
    """No advice about containers."""
    for tree, where in (({"a": 1.0}, "leaf 'a'"), (1.0, "the tree itself")):
        with pytest.raises(TypeError) as caught:
            fddp.plan_buckets(tree)
        assert str(caught.value) == (
            f"{where} is the float 1.0, which has no dtype and device; pass a tensor, such as "
            "torch.tensor(1.0)"
        )
