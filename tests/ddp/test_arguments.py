"""Arguments of the wrapper, compared with torch's own class."""

from __future__ import annotations

import inspect
import pickle
import re
import warnings
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel import distributed as torch_ddp
from torch.nn.parallel.distributed import _MixedPrecision

import fddp
from fddp.core.plan.leaf import MAX_COUNT
from fddp.ddp.arguments import Arguments, Options, checked, group_of, managed
from tests.support.ranks import RankPool

MIB = 1024 * 1024


def options(module: nn.Module | None = None, **arguments: Any) -> Options:
    return checked(nn.Linear(2, 2) if module is None else module, Arguments(**arguments))


def frozen() -> nn.Module:
    return nn.Linear(2, 2).requires_grad_(False)


def on_two_types() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))


def ignoring(module: nn.Module, *names: str) -> nn.Module:
    TorchDDP._set_params_and_buffers_to_ignore_for_model(module, names)
    return module


# Signature


def parameters_of(fn: Callable[..., Any]) -> list[tuple[str, Any]]:
    return [(p.name, p.default) for p in list(inspect.signature(fn).parameters.values())[1:]]


def are_those_of_torch(ours: list[tuple[str, Any]], theirs: list[tuple[str, Any]]) -> bool:
    """True if the parameters are those of torch 2.15. Older torch lacks some of them, and torch
    before 2.13 has other defaults."""
    known = dict(theirs)
    if "lazy_bucket_allocation" not in known:
        ours = [parameter for parameter in ours if parameter[0] in known]
    has_other_defaults = "batched_grad_copy" not in known
    return [*dict(ours)] == [*known] if has_other_defaults else ours == theirs


def test_the_signature_is_that_of_the_installed_torch() -> None:
    own = {
        "transport": "auto",
        "nonfinite": "propagate",
        "report": "now",
        "virtual_ranks": None,
        "local_gradients": "warn",
        "noise": None,
    }
    parameters = parameters_of(fddp.DistributedDataParallel.__init__)
    ours = parameters[: -len(own)]
    assert are_those_of_torch(ours, parameters_of(TorchDDP.__init__))
    assert dict(parameters[-len(own) :]) == own
    with pytest.raises(TypeError, match="positional argument"):
        fddp.DistributedDataParallel(nn.Linear(2, 2), *(value for _, value in ours[1:]), "auto")


def test_arguments_are_the_constructors_in_its_order_with_its_defaults() -> None:
    *ours, _, _, _ = [(f.name, f.default) for f in fields(Arguments)]  # without those of fddp
    assert are_those_of_torch(ours, parameters_of(TorchDDP.__init__)[1:])


# Errors

# Of some of them, how the error goes on where torch's does not name the culprit.
REMEDIES = {
    "nothing trains": "has 2 parameters, apart from ignored ones; call",
    "two devices": "Got [0, 1]: start one process for each device",
    "types of devices": "locate in ['cpu', 'meta']",
    "lazy": "'1.weight' is not initialised",
    "batch norm over ranks": "'0.norm' is on the CPU; use BatchNorm",
}
# What torch's class raises for it, and how it begins, is the expectation.
BAD: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "nothing trains": lambda: (frozen(), {}),
    "all is ignored": lambda: (ignoring(nn.Sequential(nn.Linear(2, 2)), "0.weight", "0.bias"), {}),
    "two devices": lambda: (nn.Linear(2, 2), {"device_ids": [0, 1]}),
    "device_ids on the CPU": lambda: (nn.Linear(2, 2), {"device_ids": [0]}),
    "output_device on the CPU": lambda: (nn.Linear(2, 2), {"output_device": 1}),
    "types of devices": lambda: (on_two_types(), {}),
    "lazy": lambda: (nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2)), {}),
    "batch norm over ranks": lambda: (
        nn.Sequential(nn.ModuleDict({"norm": nn.SyncBatchNorm(2)})),
        {},
    ),
    "delayed without trigger": lambda: (nn.Linear(2, 2), {"delay_all_reduce_named_params": []}),
    "trigger without delayed": lambda: (
        nn.Linear(2, 2),
        {"param_to_hook_all_reduce": nn.Parameter(torch.zeros(1))},
    ),
}


def raised(case: str, wrap: Callable[..., object]) -> tuple[type[Exception], str]:
    module, arguments = BAD[case]()
    try:
        wrap(module, **arguments)
    except Exception as error:
        return type(error), str(error)
    raise AssertionError(f"{case} was accepted")


def test_errors_are_those_of_torch(ranks: RankPool) -> None:
    (stock,) = ranks.run(1, torch_errors)
    for case, (kind, text) in stock.items():
        ours, our_text = raised(case, lambda module, **given: options(module, **given))
        assert issubclass(ours, kind), case
        # Up to the first full stop or value; ours continues with the remedy.
        common = re.split(r"[.]| but got |\{", text)[0]
        assert common in our_text, case
        assert REMEDIES.get(case, "") in our_text


def torch_errors(rank: int, world_size: int) -> dict[str, tuple[type[Exception], str]]:
    return {case: raised(case, TorchDDP) for case in BAD}


@pytest.mark.parametrize(
    "given",
    [
        {"bucket_cap_mb": -1},
        {"bucket_cap_mb": float("nan")},
        {"bucket_cap_mb": float("inf")},
        {"bucket_cap_mb": "25"},
        {"bucket_cap_mb_list": [1, -1]},
        {"bucket_cap_mb_list": [1e300]},
    ],
)
def test_a_cap_must_be_a_size(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(ValueError, match=f"{name} must hold MB .* at least 0 and finite, got"):
        options(**given)


@pytest.mark.parametrize("name", ["local_gradients", "nonfinite"])
def test_unknown_policies_are_errors_with_a_suggestion(name: str) -> None:
    def wrap(group: Any) -> None:
        with pytest.raises(ValueError, match=rf"^{name} must be one of .*; did you mean 'raise'\?"):
            fddp.DistributedDataParallel(nn.Linear(2, 2), process_group=group, **{name: "rise"})

    fddp.loopback(1, wrap)


def test_a_module_on_one_accelerator_has_one_device() -> None:
    found = options(nn.Linear(2, 2, device="meta"), device_ids=[torch.device("cuda", 3)])
    assert (found.device_ids, found.output_device) == ((3,), 3)
    assert found.device == torch.device("meta")
    found = options(nn.Linear(2, 2, device="meta"), device_ids=[3], output_device=1)
    assert (found.device_ids, found.output_device) == ((3,), 1)
    assert not found.is_multi_device
    found = options(device_ids=[], output_device=0)  # falsy ones are accepted, as by torch
    assert (found.device_ids, found.output_device) == (None, None)


# Groups


def test_groups(ranks: RankPool) -> None:
    with pytest.raises(ValueError, match="Default process group has not been initialized, please"):
        group_of(Arguments())
    ranks.run(2, judge_groups)


def judge_groups(rank: int, world_size: int) -> None:
    assert all(fddp.loopback(2, lambda group: group_of(Arguments(process_group=group)) is group))
    world = dist.group.WORLD
    assert group_of(Arguments()) is world
    alone = dist.new_group([0])
    if rank == 0:
        assert group_of(Arguments(process_group=alone)) is alone
    else:
        with pytest.raises(ValueError, match="this rank is no member of it; wrap the module only"):
            group_of(Arguments(process_group=alone))
    mesh = init_device_mesh("cpu", (2,))
    assert group_of(Arguments(device_mesh=mesh)) is mesh.get_group()
    square = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    assert group_of(Arguments(device_mesh=square["a"])) is square["a"].get_group()
    for both in (TorchDDP, lambda module, **given: group_of(Arguments(**given))):
        with pytest.raises(RuntimeError, match="Cannot specify both process_group and device_mesh"):
            both(nn.Linear(2, 2), process_group=world, device_mesh=mesh)
        with pytest.raises(RuntimeError, match="Only 1D device mesh is supported, but got"):
            both(nn.Linear(2, 2), device_mesh=square)


# Values


@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("cap", [None, 0, 1e-9, 1.5, 25])
@pytest.mark.parametrize("caps", [None, [], [1], [2, 0.5]])
@pytest.mark.filterwarnings("ignore:You passed find_unused_parameters=true")
@pytest.mark.skipif(not hasattr(torch_ddp, "_BucketCapacityConfig"), reason="torch 2.11 lacks it")
def test_caps_are_those_of_torch(
    find_unused: bool, static: bool, cap: float | None, caps: list[float] | None
) -> None:
    found = options(
        bucket_cap_mb=cap,
        bucket_cap_mb_list=caps,
        find_unused_parameters=find_unused,
        static_graph=static,
    )
    config = torch_ddp._BucketCapacityConfig.create(cap, caps, use_python_reducer=False)
    initial, rebuilt = config.compute_bucket_size_limits(static, find_unused)
    # With nothing listed, torch's reducer starts a rebuilt plan with the first cap.
    rebuilt = rebuilt or [config.first_bucket_bytes_cap, config.bucket_bytes_cap]

    def canonical(limits: Any) -> list[int]:
        """At least a byte, and without repetitions of the last, which repeats anyway."""
        limits = [max(1, limit) for limit in limits]
        while len(limits) > 1 and limits[-1] == limits[-2]:
            limits.pop()
        return limits

    assert canonical(found.initial_caps_bytes) == canonical(initial)
    assert canonical(found.rebuilt_caps_bytes) == canonical(rebuilt)
    assert found.cap_bytes == max(1, config.bucket_bytes_cap)
    assert found.first_cap_bytes == max(1, config.first_bucket_bytes_cap)
    assert found.listed_caps_bytes == config.per_bucket_bytes_caps


def test_a_graph_can_be_declared_static_later() -> None:
    dynamic = options(find_unused_parameters=True)
    assert dynamic.initial_caps_bytes == (1 * MIB, 25 * MIB)
    static = replace(dynamic, arguments=replace(dynamic.arguments, static_graph=True))
    assert static.initial_caps_bytes == (MAX_COUNT,)


def test_ignored_names() -> None:
    module = nn.Module()
    module.inner = nn.Linear(2, 2)
    module.own = nn.Parameter(torch.zeros(1))
    # Torch's recipe for names makes this one of the root's parameter.
    assert options(ignoring(module, ".own", "inner.bias")).ignored == {"own", "inner.bias"}
    found = options(
        ignoring(module, "own"),
        delay_all_reduce_named_params=iter([("inner.bias", module.inner.bias)]),
        param_to_hook_all_reduce=module.inner.weight,
    )
    assert found.ignored == {"own", "inner.bias"}
    assert list(managed(module, found.ignored)) == ["inner.weight"]
    layer = nn.Linear(2, 2)
    found = options(  # all parameters, from an iterator that is read more than once
        layer,
        delay_all_reduce_named_params=layer.named_parameters(),
        param_to_hook_all_reduce=layer.weight,
    )
    assert found.device == torch.device("cpu")
    assert found.ignored == {"weight", "bias"}
    arguments = Arguments(delay_all_reduce_named_params=layer.named_parameters())
    for _ in range(2):
        assert len(tuple(arguments.delay_all_reduce_named_params or ())) == 2


def test_sparse_names_and_shared_parameters() -> None:
    module = nn.ModuleDict(
        {
            "words": nn.Embedding(3, 2, sparse=True),
            "bag": nn.EmbeddingBag(3, 2, sparse=True),
            "dense": nn.Embedding(3, 2),
            "out": nn.Linear(2, 3),
        }
    )
    module["out"].weight = module["words"].weight
    assert options(module).sparse == {"words.weight", "bag.weight"}
    assert list(managed(module, frozenset())) == [
        *("words.weight", "bag.weight", "dense.weight", "out.bias")
    ]


@pytest.mark.parametrize("broadcast", [None, False, True])
@pytest.mark.parametrize("forward", [None, False, True])
def test_buffers_are_synced_as_by_torch(
    ranks: RankPool, broadcast: bool | None, forward: bool | None
) -> None:
    if "forward_sync_buffers" not in dict(parameters_of(TorchDDP.__init__)):
        pytest.skip(f"torch {torch.__version__} lacks forward_sync_buffers")
    given = {"broadcast_buffers": broadcast, "forward_sync_buffers": forward}
    (synced,) = ranks.run(1, torch_syncs, given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = options(**given)
    assert found.forward_sync_buffers == synced
    assert found.init_sync_buffers == (True if forward is not None else broadcast is not False)


def torch_syncs(rank: int, world_size: int, given: dict[str, bool | None]) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return bool(TorchDDP(nn.Linear(2, 2), **given).forward_sync_buffers)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"broadcast_buffers": True}, "is deprecated. Use `forward_sync_buffers` instead"),
        ({"broadcast_buffers": True, "forward_sync_buffers": True}, "its value is ignored"),
        ({"check_reduction": True}, "`check_reduction` .* has no effect"),
    ],
)
def test_deprecated_arguments_warn_where_they_are_passed(given: dict[str, Any], text: str) -> None:
    script = compile("wrap(nn.Linear(1, 1), process_group=group, **given)", "user's script", "exec")
    names = {"wrap": fddp.DistributedDataParallel, "nn": nn, "given": given}
    with pytest.warns(FutureWarning, match=text) as caught:
        fddp.loopback(1, lambda group: exec(script, {**names, "group": group}))
    (warning,) = caught
    assert warning.filename == "user's script"


def test_options_are_a_value() -> None:
    config = _MixedPrecision(param_dtype=torch.bfloat16)
    found = options(bucket_cap_mb=1, mixed_precision=config)
    assert pickle.loads(pickle.dumps(found)) == found
    assert found != options(bucket_cap_mb=2, mixed_precision=config)
