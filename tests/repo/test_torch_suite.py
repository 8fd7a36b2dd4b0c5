"""torch's own tests of DistributedDataParallel, run on fddp's class; by night those that take long.

`TORCH_SUITE_WRAPPER=torch.nn.parallel.distributed.DistributedDataParallel` runs them on torch's.
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.ddp.torch_suite.catalogue import (
    TorchTest,
    through_functions,
    torch_tests,
    wrapper_test_names,
)
from tests.ddp.torch_suite.edits import EDITS
from tests.ddp.torch_suite.left_out import LEFT_OUT
from tests.support.ranks import RankPool

if TYPE_CHECKING:
    from collections.abc import Iterator

_WRAPPER = os.environ.get("TORCH_SUITE_WRAPPER", "fddp.DistributedDataParallel")
_ALL = torch_tests()
_LONG = {
    *("test_backward_ddp_inside", "test_backward_ddp_outside", "test_backward_no_ddp"),
    *("test_backward_ddp_outside_uneven_inputs", "test_ddp_comparison", "test_ddp_uneven_inputs"),
    *("test_DistributedDataParallel", "test_DistributedDataParallelCPU"),
    "test_DistributedDataParallel_non_default_stream",
    *("test_ddp_hook_with_optimizer_parity_adamw", "test_ddp_hook_with_optimizer_parity_sgd"),
    *("test_ddp_apply_optim_in_backward", "test_ddp_compile_static_graph"),
    *("test_ddp_hook_parity_powerSGD", "test_ddp_hook_parity_allreduce_process_group"),
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd",
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view",
    *("test_ddp_comparison_uneven_inputs", "test_DistributedDataParallelCPU_grad_is_view"),
    *("test_ddp_hook_parity_post_localSGD", "test_ddp_hook_with_optimizer_parity_adam"),
    "test_ddp_apply_optim_in_backward_grad_as_bucket_view_false",
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value",
    "test_ddp_dist_autograd_local_vs_remote_gpu",
}
_LEFT_OUT = {name for names in LEFT_OUT.values() for name in names}


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[str, RankPool]]:
    """Processes of this module alone, because torch's tests leave traces; by `TorchTest.pool`."""
    pools: dict[str, RankPool] = defaultdict(RankPool)
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.mark.parametrize(
    "test",
    # Those of one pool together; few ranks first, so that no more processes wait than needed.
    [
        pytest.param(test, id=test.name, marks=[pytest.mark.nightly] * (test.name in _LONG))
        for test in sorted(_ALL, key=lambda test: (test.pool, test.world_size))
        if test.name not in _LEFT_OUT
    ],
)
def test_torch_suite(test: TorchTest, pools: dict[str, RankPool], tmp_path: Path) -> None:
    for name, pool in pools.items():
        if name != test.pool:
            pool.close()
    pools[test.pool].run(test.world_size, _run, test, _WRAPPER, str(tmp_path / "store"))


def _run(rank: int, world_size: int, test: TorchTest, wrapper: str, shared_file: str) -> None:
    # Not on top: importing torch's test modules changes flags of torch.
    from tests.ddp.torch_suite import on_rank

    on_rank.run(rank, world_size, test, wrapper, shared_file)


def test_left_out_tests_exist() -> None:
    assert not (_LEFT_OUT | _LONG) - {test.name for test in _ALL} - wrapper_test_names()


def test_the_page_lists_what_is_left_out_and_edited() -> None:
    page = (Path(__file__).parents[2] / "docs/ddp.md").read_text()
    section = page.partition("\n## The tests of torch\n")[2].partition("\n## ")[0]
    rows = [
        *(
            f"| {', '.join(f'`{n}`' for n in sorted(names))} | {why} |"
            for why, names in LEFT_OUT.items()
        ),
        *(f"| `{edit.function}` | `{edit.old}` | `{edit.new}` | {edit.reason} |" for edit in EDITS),
    ]
    assert [line for line in section.splitlines() if line.startswith("| `")] == rows
    run = {test.name for test in _ALL} - _LEFT_OUT
    edited = run & through_functions({edit.function for edit in EDITS})
    if torch.__version__.startswith("2.13."):
        text = f"{len(run)} of the {len(_ALL)} DDP tests"
        assert text in " ".join(page.split())
        assert f"{len(edited)} of them" in " ".join(section.split())
        readme = (Path(__file__).parents[2] / "README.md").read_text()
        assert text in " ".join(readme.split())


def test_no_test_is_missed() -> None:
    assert not wrapper_test_names() - {test.name for test in _ALL} - _LEFT_OUT
