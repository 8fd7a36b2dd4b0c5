"""Names of torch's class, reducer and logger: each has a meaning here, or is listed in the docs."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from functools import reduce
from inspect import getattr_static
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as StockDDP

import fddp
from fddp.ddp.reducer_facade import refused
from fddp.hooks import TorchHook

PAGE = Path(__file__).parents[2] / "docs" / "ddp.md"
OURS = fddp.DistributedDataParallel
READ = r"self\.(?!buffer_hook)\w+(\.\w+)*"  # the attribute that is set by a call aside


def wrapped(**options: Any) -> Any:
    made = fddp.loopback(1, lambda group: OURS(nn.Linear(2, 2), process_group=group, **options))
    return made[0]


def names_of(parts: tuple[type, ...]) -> set[str]:
    return {name for part in parts for name in dir(part) if not name.startswith("_pybind11")}


def inherited() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Methods of torch's class that ours does not override."""
    for name, given in vars(StockDDP).items():
        function = given.fget if isinstance(given, property) else getattr(given, "__func__", given)
        if name not in vars(OURS) and inspect.isfunction(function):
            yield name, inspect.unwrap(function)


def reads(function: Callable[..., Any]) -> set[str]:
    """Attributes of `self` that a method reads, such as "self.reducer.set_logger"."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    paths = [ast.unparse(node) for node in nodes if isinstance(node.ctx, ast.Load)]
    return {path for path in paths if re.fullmatch(READ, path)}


def test_names_without_counterpart_are_in_the_docs() -> None:
    found = {
        name
        for part in (OURS, type(wrapped().reducer), type(wrapped().logger))
        for name in dir(part)
        if getattr_static(part, name) is refused
    }
    found |= {name for name, method in inherited() if any(map(is_refused, reads(method)))}
    (listed,) = re.findall(r"^\| (.*) \| \*\*Differs\*\*: `NotImpl.*$", PAGE.read_text(), re.M)
    assert found == set(re.findall(r"`(\w+)`", listed))


def is_refused(path: str) -> bool:
    *holders, name = path.split(".")[1:]
    return getattr_static(reduce(getattr, holders, wrapped()), name, None) is refused


def test_all_other_names_are_there() -> None:
    ddp = wrapped()
    assert names_of((StockDDP,)) <= set(dir(ddp))
    assert names_of((dist.Reducer,)) <= set(dir(ddp.reducer))
    assert names_of((dist.Logger,)) <= set(dir(ddp.logger))


@pytest.mark.parametrize("name", [name for name, _ in inherited()])
def test_inherited_methods_read_attributes_that_exist(name: str) -> None:
    ddp = wrapped()
    for path in reads(dict(inherited())[name]):
        *holders, last = path.split(".")[1:]
        assert last in dir(reduce(getattr, holders, ddp)), path


def test_refused_methods_name_the_way_out() -> None:
    ddp = wrapped()
    for call in (ddp._clear_grad_buffer, lambda: ddp._set_sparse_metadata({})):
        with pytest.raises(NotImplementedError, match="call the methods of the wrapped module"):
            call()


def test_statistics_of_a_backward_pass() -> None:
    def train(group: Any) -> Any:
        ddp = OURS(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), process_group=group)
        before = ddp.reducer.get_backward_stats()
        ddp.reducer.prepare_for_forward()
        ddp(torch.ones(1, 2)).sum().backward()
        return before, ddp.reducer.get_backward_stats()

    before, after = fddp.loopback(1, train)[0]
    assert before == [0, 0, 0, 0]
    assert min(after) > 0
    assert max(after[2:]) < min(after[:2]), "the last layer comes first"


def test_join_is_remembered() -> None:
    ddp = wrapped()
    ddp.join_hook(divide_by_initial_world_size=False)
    assert ddp._divide_by_initial_world_size is False


def test_logger_has_the_data_under_the_names_of_torch() -> None:
    ddp = wrapped(static_graph=True)
    data, logged = ddp._get_ddp_logging_data(), ddp.logger._get_ddp_logging_data()
    assert {**logged.strs_map, **logged.ints_map} == data
    assert logged.ints_map["static_graph"] == 1


def test_hooks_of_the_reducer() -> None:
    def train(group: Any) -> Any:
        ddp, seen, future = OURS(nn.Linear(2, 2), process_group=group), [], torch.futures.Future()
        future.set_result(None)

        def hook(state: Any, bucket: Any) -> Any:
            seen.append(isinstance(bucket, dist.GradBucket))
            done: Any = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        ddp.register_comm_hook(None, hook)
        ddp.reducer._install_post_backward_futures([future])
        (bucket,) = ddp.reducer._get_zeros_like_grad_buckets()
        assert ddp.reducer._run_comm_hook(bucket).wait() is bucket.buffer()
        ddp(torch.ones(1, 2)).sum().backward()
        assert isinstance(ddp._steps.engine.hook, TorchHook)
        return seen, ddp.logger.data["comm_hook"].rpartition(".")[-1]

    assert fddp.loopback(1, train) == [([True, True], "hook")]
