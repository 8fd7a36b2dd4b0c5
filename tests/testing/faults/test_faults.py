"""Faults give other results on ranks than on one device, and the right steps beside them don't."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest

import fddp
from fddp.testing import check_equivalence, check_replication
from tests.testing.faults import clips, counts, losses
from tests.testing.faults.fault import (
    ACCUMULATION,
    AVERAGED,
    BY_RANKS,
    CLIPPED,
    COUNTED_TWICE,
    DIVIDED_TWICE,
    MEAN_OF_MEANS,
    NORM_TWICE,
    OWN_COUNT,
    OWN_NORM,
    OWN_STATISTICS,
    SUMMED,
    Fault,
)
from tests.testing.replication.truth import unlike_one_device

FAULTS = [fault for kind in (losses, clips, counts) for fault in kind.faults()]
LEAST_NAMED = 18
NAMES = {
    MEAN_OF_MEANS: "mean of means|count of this rank",
    DIVIDED_TWICE: "divided by the number of ranks twice|changes with the number of ranks",
    SUMMED: "summed over ranks where the mean|changes with the number of ranks",
    AVERAGED: "averaged over ranks",
    OWN_COUNT: "count of this rank|mean of means|a rank's rows",
    OWN_STATISTICS: "batch statistics|a rank's rows",
    CLIPPED: "clipped",
    OWN_NORM: "clipped|norm of",
    NORM_TWICE: "norm is summed|factor is the number of ranks",
    ACCUMULATION: "accumulat",
    COUNTED_TWICE: "twice|mean of means",
    BY_RANKS: "with the number of ranks|group.size",
}
"""Words of an error that name a cause."""


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS[::3], ids=str)
def test_faults_show_on_ranks_alone(fault: Fault) -> None:
    assert_shown_on_ranks(fault)


@pytest.mark.nightly
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_all_faults_show_on_ranks_alone(fault: Fault) -> None:
    assert_shown_on_ranks(fault)


def assert_shown_on_ranks(fault: Fault) -> None:
    """Compare the wrong and the right step with one device."""
    for ranks in (2, 3):
        assert unlike_one_device(fault.wrong, fault.state, fault.batch, ranks)
        assert unlike_one_device(fault.right, fault.state, fault.batch, ranks) == ""


def test_sources_are_named() -> None:
    assert len(FAULTS) >= 20
    assert len({fault.source for fault in FAULTS}) == len(FAULTS)


@pytest.mark.nightly
def test_one_of_two_checks_names_the_cause() -> None:
    unnamed = []
    for fault in FAULTS:
        wrong, right, inputs = fault.wrong, fault.right, (fault.state, fault.batch)
        alone = text_of(check_replication, wrong, replicated=fault.state, varying=fault.batch)
        beside = text_of(check_equivalence, wrong, *inputs)
        if not re.search(NAMES[fault.cause], f"{alone}\n{beside}"):
            unnamed.append(f"{fault.source} ({fault}), {fault.cause}:\n{alone}\n{beside}")
        assert text_of(check_equivalence, right, *inputs) == "", right.__name__
    print(*unnamed, sep="\n\n")
    assert len(FAULTS) - len(unnamed) >= LEAST_NAMED


def text_of(check: Callable[..., None], *args: Any, **kwargs: Any) -> str:
    """Text of a check's error; "" if there is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check(*args, **kwargs)
    except (fddp.errors.FddpError, ValueError) as error:
        return str(error)
    return ""
