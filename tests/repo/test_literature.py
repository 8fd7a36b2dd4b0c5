"""Published models and results: totals of parameters, baselines, and the tables' own claims."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.literature import mg_wfbp
from benchmarks.literature.models import (
    BACKWARD_SHARE,
    Layer,
    bert,
    densenet201,
    inception_v4,
    parameters,
    profile,
    resnet,
)
from benchmarks.literature.tables import Row

# Totals of torchvision (resnet, densenet), of timm (inception_v4) and of transformers
# (BertForPreTraining).
MODELS = {
    "ResNet-50": (resnet(50), 25_557_032, 161),
    "ResNet-101": (resnet(101), 44_549_160, 314),
    "ResNet-152": (resnet(152), 60_192_808, 467),
    "DenseNet-201": (densenet201(), 20_013_928, 604),
    "Inception-v4": (inception_v4(), 42_679_816, 449),
    "BERT-base": (bert(12, 768, tokens=128), 110_106_428, 206),
    "BERT-large": (bert(24, 1024, tokens=128), 336_226_108, 398),
}

# Multiplications and additions of one sample, each counted as one, to 2 %: twice those that
# torchvision states as GFLOPS (4.09, 7.80, 11.51, 4.29) and timm as GMACs (12.28).
GIGA_OPERATIONS = {
    "ResNet-50": 8.18,
    "ResNet-101": 15.60,
    "ResNet-152": 23.03,
    "DenseNet-201": 8.58,
    "Inception-v4": 24.56,
}


@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_published_parameters(name: str) -> None:
    layers, numel, tensors = MODELS[name]
    assert parameters(layers) == numel
    assert sum(len(layer.shapes) for layer in layers) == tensors
    assert len({layer.name for layer in layers}) == len(layers)


@pytest.mark.parametrize("name", GIGA_OPERATIONS)
def test_models_have_the_published_operations(name: str) -> None:
    work = sum(layer.work for layer in MODELS[name][0])
    assert work / 1e9 == pytest.approx(GIGA_OPERATIONS[name], rel=0.02)


def test_backward_is_divided_by_work() -> None:
    layers = [Layer("a", {"w": (2,)}, 1), Layer("none", {}, 4), Layer("b", {"w": (3,)}, 5)]
    model = profile("tiny", layers, 3.0)
    assert model.compute_s == 3.0
    assert model.order == (1, 0)
    assert model.ready_s == pytest.approx((3.0, 3.0 * (1.0 - BACKWARD_SHARE / 2)))


def test_an_all_reduce_takes_the_published_time() -> None:
    for link in mg_wfbp.LINKS:
        for nbytes in (0.0, 4.0, 1e8):
            expected_s = link.alpha_s + link.beta_s_per_byte * nbytes
            found_s = link.cost.time_s("all_reduce", nbytes, link.ranks)
            assert found_s == pytest.approx(expected_s)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_greedy_merging_waits_while_waiting_is_free(seed: int) -> None:
    """The rule of MG-WFBP, checked on the buckets that it gave."""
    model, link = mg_wfbp.generated(seed)
    plan = mg_wfbp.merged_greedily(model, link)
    order = [leaf for bucket in plan.buckets for leaf in bucket.leaves]
    assert order == list(model.order)
    free_s = 0.0
    for bucket, following in pairwise((*plan.buckets, None)):
        assert bucket is not None
        starts_s = [max(free_s, model.ready_s[leaf]) for leaf in bucket.leaves]
        for start_s, leaf in zip(starts_s, bucket.leaves[1:], strict=False):
            assert model.ready_s[leaf] < start_s + link.alpha_s
        if following is not None:
            assert model.ready_s[following.leaves[0]] >= starts_s[-1] + link.alpha_s
        free_s = starts_s[-1] + link.alpha_s + link.beta_s_per_byte * bucket.nbytes


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_the_optimum_is_never_worse_than_greedy_merging(seed: int) -> None:
    greedy_s, optimal_s = mg_wfbp.against_greedy(*mg_wfbp.generated(seed))
    assert optimal_s <= greedy_s * (1.0 + mg_wfbp.ROUNDING)


def test_the_optimum_is_never_worse_on_published_models() -> None:
    result = mg_wfbp.result(models=20)
    assert len(result.rows) == 15
    assert all(row.deviation <= mg_wfbp.ROUNDING for row in result.rows)
    assert any(row.deviation < -0.02 for row in result.rows)
    assert result.notes[-1] == "plan_optimal is worse than greedy merging in 0 cases."
    assert result.table().row_count == 15


def test_rows_report_misses() -> None:
    near, far = (Row("step, s", 1.0, ours, "paper", within=0.1) for ours in (1.1, 1.2))
    assert not near.missed
    assert far.missed
    assert not Row("step, s", 1.0, 9.0, "paper").missed
