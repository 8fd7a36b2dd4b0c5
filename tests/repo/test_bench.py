"""The benchmark runs, compares like with like, and says what it measured; never how fast."""

from __future__ import annotations

import inspect
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from benchmarks import (
    backend_steps,
    bounds,
    collectives,
    ddp_comparison,
    few_bytes,
    fixed_cost,
    gpu,
    host_time,
    memory,
    noise,
    packing,
    per_parameter,
    transports,
    virtual_ranks,
)
from benchmarks import operators as functional
from benchmarks.bounds import Figure, at_least, at_most, from_values, to_values
from benchmarks.competitors import (
    DETERMINISTIC,
    FDDP,
    FLAT,
    LOCAL_FUNCTION,
    LOCAL_MODULE,
    OVER_GLOO,
    contestants,
    makers,
    twin,
)
from benchmarks.measure import Ratio, Series, measure
from benchmarks.models import WORKLOADS, Workload, stack
from benchmarks.passes import memory_passes
from benchmarks.report import Entry, ModelResult, Report, figures, warning
from benchmarks.steps import check_gradients
from fddp.cli.progress import Stages
from fddp.transport import open_transport
from tests.support import commands as cli

if TYPE_CHECKING:
    from tests.support.ranks import RankPool

SYNCHRONISED = {name for name in makers(has_buffers=False) if not name.startswith("local")}


def test_fddp_runs_over_its_own_transport_and_over_gloo() -> None:
    assert {FDDP, FDDP + OVER_GLOO, FLAT, "DDP static"} <= SYNCHRONISED
    options = inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
    assert ("DDP batched" in SYNCHRONISED) == ("batched_grad_copy" in options)
    wrappers = {name for name in makers(has_buffers=True) if twin(name)}
    modes = {"default", "view"}
    if "forward_sync_buffers" in options:
        modes.add("view, own buffers")
    assert wrappers == {f"fddp.DDP {m}{over}" for m in modes for over in ("", OVER_GLOO)}
    assert {twin(name) for name in wrappers} <= makers(has_buffers=True).keys()


@pytest.mark.nightly
def test_the_command_measures_and_writes(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    chosen = ["small", "conv"]
    assert cli.main(["bench", "--quick", "--models", *chosen, "--json", str(path)]) == 0
    printed = capfd.readouterr().out
    assert f"written to {path}" in printed
    written = json.loads(path.read_text())
    wanted = {"ranks": 2, "threads_per_rank": 1, "torch": torch.__version__}
    assert wanted.items() <= written["environment"].items()
    assert written["rounds"] == 2
    assert list(written["models"]) == chosen
    for name, model in written["models"].items():
        assert model["title"] in printed
        assert model["steps_per_round"] == 1
        assert model["best_ddp"].startswith("DDP ")
        assert model["contestants"].keys() == makers(has_buffers=name == "conv").keys()
        for contestant, values in model["contestants"].items():
            assert contestant in printed
            is_function = contestant in (FDDP, FDDP + OVER_GLOO, DETERMINISTIC, LOCAL_FUNCTION)
            assert values["form"] == ("function" if is_function else "module")
            assert len(values["rounds_s"]) == 2
            assert values["median_s"] > 0
            if contestant in SYNCHRONISED:
                assert set(values["step_ratio"]) == {"median", "low", "high"}
                assert isinstance(values["added_s"], float)
            if contestant.endswith(OVER_GLOO):
                assert values["transport"] == "c10d"
    assert [small["nbytes"] for small in written["small"]] == [4, 65536, 1048576]
    assert written["figures"] == []
    assert "Figures and their bounds" not in printed
    assert "inf" not in printed
    assert "A quick run: it shows that everything works, and judges no figure." in printed


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_model_is_the_same_as_module_and_as_function(name: str) -> None:
    workload = WORKLOADS[name]
    module, batch = workload.build(), workload.batch(0)
    params, loss_fn, buffers = workload.to_function(workload.build())
    loss = module(batch)
    if buffers is None:
        assert torch.equal(loss, loss_fn(params, batch))
        assert not list(module.buffers())
    else:
        other, new = loss_fn(params, buffers, batch)
        assert torch.equal(loss, other)
        for key, buffer in module.named_buffers():
            assert torch.equal(buffer, new[key])
            assert not torch.equal(buffer, buffers[key])  # training writes all of them
    loss.backward()
    # Zeros, or nearly, would be right whatever became of them.
    assert all(1e-6 < p.grad.norm() < 1e6 for p in module.parameters())
    assert not torch.equal(batch, workload.batch(1))


def _field(rank: int, world_size: int) -> tuple[set[str], bool, str]:
    field = contestants(WORKLOADS["small"], WORKLOADS["small"].batch(rank))
    local = field[0]
    for contestant in field:
        for _ in range(3):
            contestant.step()
    check_gradients(field)
    alike = all(
        torch.equal(a, b) for a, b in zip(local.gradients(), field[-1].gradients(), strict=True)
    )
    field[2].gradients()[7].mul_(1.001)
    try:
        check_gradients(field)
    except RuntimeError as error:
        return {c.name for c in field}, alike, str(error)
    return set(), alike, ""


@pytest.mark.nightly
def test_wrong_gradients_are_not_timed(ranks: RankPool) -> None:
    for names, alike, error in ranks.run(2, _field):
        assert names == {LOCAL_MODULE, LOCAL_FUNCTION, *SYNCHRONISED}
        assert not alike  # ranks have different batches, or the check would see nothing
        assert error == f"{FDDP!r} gave other gradients than {FLAT!r}: not worth timing"


def _turns(rank: int, world_size: int) -> tuple[list[str], dict[str, Series]]:
    calls: list[str] = []
    steps = {name: lambda name=name: calls.append(name) for name in "abc"}
    series = measure(steps, 2, 3, lambda: calls.append("|"))
    dist.barrier()
    return calls, series


def test_contestants_take_turns(ranks: RankPool) -> None:
    (calls, series), (_, others) = ranks.run(2, _turns)
    assert "".join(calls) == "aaaabbbbcccc|bbbbccccaaaa|"
    assert list(series) == ["a", "b", "c"]
    assert series == others
    assert all(len(each.rounds_s) == 2 for each in series.values())


def entry(name: str, form: str, is_ddp: bool, *rounds_s: float) -> Entry:
    return Entry(name, form, is_ddp, "gloo", Series(rounds_s))


TINY = ModelResult(
    "tiny",
    tensors=1,
    elements=1,
    steps=1,
    entries=(
        entry(LOCAL_MODULE, "module", False, 1.0, 1.0, 1.0),
        entry(LOCAL_FUNCTION, "function", False, 2.0, 2.0, 2.0),
        entry(FDDP, "function", False, 4.0, 3.0, 3.0),
        entry(FDDP + OVER_GLOO, "function", False, 4.0, 6.0, 6.0),
        entry("fddp.DDP default", "module", False, 1.5, 1.5, 1.5),
        entry("DDP default", "module", True, 5.0, 5.0, 5.0),
        entry("DDP static", "module", True, 2.0, 3.0, 6.0),
    ),
    passes=Series((0.5, 0.5, 1.0)),
)


def test_added_time_is_step_less_local_step() -> None:
    assert TINY.best_ddp.name == "DDP static"
    assert TINY.versus_best(TINY.entry(FDDP)) == (1.0, 0.5, 2.0)
    assert TINY.added(TINY.entry(FDDP)).rounds_s == (2.0, 1.0, 1.0)
    assert TINY.added(TINY.best_ddp).rounds_s == (1.0, 2.0, 5.0)
    assert TINY.added_versus_best(TINY.entry(FDDP)) == (0.5, 0.2, 2.0)
    assert TINY.versus_twin(TINY.entry("fddp.DDP default")) == (0.3, 0.3, 0.3)


def test_the_memory_passes_are_relative_to_what_ddp_adds() -> None:
    assert TINY.to_best_added(TINY.passes) == (0.25, 0.2, 0.5)


def _passes(rank: int, world_size: int) -> list[list[float]]:
    gradients = [torch.full((2, 3), 1.0 + dist.get_rank()), torch.full((5,), 3.0)]
    with open_transport(None, "auto", 10.0, "test") as transport:
        run = memory_passes(gradients, transport)
        return [run().tolist() for _ in range(2)]


def test_the_memory_passes_pack_and_reduce_all_gradients(ranks: RankPool) -> None:
    for reduced in ranks.run(2, _passes):
        assert reduced == [[3.0] * 6 + [6.0] * 5] * 2


def test_a_round_in_which_ddp_added_nothing_proves_nothing() -> None:
    fast = entry("DDP static", "module", True, 0.9, 1.0, 1.5)
    model = ModelResult("tiny", 1, 1, 1, (*TINY.entries[:-1], fast), TINY.passes)
    assert model.added_versus_best(model.entry(FDDP)) == (math.inf, 2.0, math.inf)


def test_figures_are_computed_not_asserted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    found = figures(Report(2, 3, 0.0, {"tiny": TINY}, ()))
    assert [(f.what, f.case, f.value, f.bound, f.reached) for f in found] == [
        ("added, function / best DDP", "tiny", 0.5, 0.20, False),
        ("added, wrapper / best DDP", "tiny, default", 0.25, 0.25, True),
        ("step over gloo, function / best DDP", "tiny", 2.0, 1.0, False),
    ]
    crowded = figures(Report(4, 3, 0.0, {"tiny": TINY}, ()))
    assert [(f.what, f.case, f.value, f.reached) for f in crowded] == [
        ("step, 4 ranks on 2 cores / best DDP", "tiny", 1.0, True),
        ("step, 4 ranks on 2 cores / best DDP", "tiny, default", 0.5, True),
    ]


def test_busy_machine_is_reported() -> None:
    assert warning(Report(2, 3, 0.5, {}, ())) == ""
    assert figures(Report(2, 3, 0.0, {"tiny": TINY}, (), quick=True)) == []
    assert "load average was 4.0 before" in warning(Report(2, 3, 4.0, {}, ()))


def test_hooks_are_compared_on_the_same_steps() -> None:
    """In three steps of the transformer."""
    runs = few_bytes.measured(3, "hooks of a transformer")
    assert [run.name for run in runs] == [method.name for method in few_bytes.HOOKS]
    assert {run.curve[-1][0] for run in runs} == {3}
    assert all(run.sent > 0 for run in runs)
    losses = {run.name: run.loss for run in runs}
    assert len({*losses.values()}) == len(runs) - 2, "auto chooses alike in the first steps"


def test_bounds() -> None:
    assert at_most(1.0, "a", "b", Ratio(1.0, 0.9, 1.1)).reached
    assert not at_most(1.0, "a", "b", Ratio(1.01, 0.9, 1.1)).reached
    assert at_least(1.0, "a", "b", Ratio(1.0, 0.9, 1.1)).reached
    assert not at_least(1.0, "a", "b", Ratio(0.99, 0.9, 1.1)).reached
    assert not at_most(1.0, "a", "b", Ratio(math.nan, 0.9, 1.1)).reached
    assert not at_least(1.0, "a", "b", Ratio(math.nan, 0.9, 1.1)).reached


def test_figures_of_several_files_in_one_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = Figure("step", "mlp", 1.25, 1.0, 1.5, 1.0, "at most")
    two = Figure("speed", "4 MiB", 20.0, 10.0, 30.0, 12.0, "at least")
    for name, figure in (("one", one), ("two", two)):
        text = json.dumps({"figures": to_values([figure])})
        (tmp_path / f"{name}.json").write_text(text)
        assert from_values(json.loads(text)["figures"]) == [figure]
    bounds.main([str(tmp_path / f"{name}.json") for name in ("one", "two", "three")])
    printed = capsys.readouterr()
    assert "1.25 (1.00-1.50)" in printed.out
    assert "<= 1" in printed.out
    assert ">= 12" in printed.out
    assert printed.out.count(" no ") == 1
    assert printed.out.count(" yes ") == 1
    assert "three.json is missing: its benchmark did not run to its end" in printed.err


def _case(nbytes: int, **us: float) -> transports.Case:
    names = {"shm": "shm", "copy": "memcpy", "slow": "gloo, 1 thread", "fast": "gloo, 2 threads"}
    return transports.Case(nbytes, {names[key]: Series((value,) * 2) for key, value in us.items()})


def test_figures_of_transports_are_against_gloos_faster_mode() -> None:
    kib, mib = 1 << 10, 1 << 20
    cases = (
        _case(256 * kib, shm=1.0, slow=30.0, fast=11.0, copy=1.0),
        _case(mib, shm=1.0, slow=30.0, fast=11.0, copy=1.0),
        _case(4 * mib, shm=1.0, slow=30.0, fast=11.0, copy=1.0),
        _case(64 * mib, shm=1.5, slow=30.0, fast=11.0, copy=1.0),
    )
    found = transports.figures(transports.Result(2, 2, "", cases))
    assert [(f.case, f.value, f.bound, f.reached) for f in found] == [
        ("256 KiB", 11.0, 10.0, True),
        ("4 MiB", 11.0, 12.0, False),
        ("64 MiB", pytest.approx(7.33, rel=1e-2), 5.0, True),
        ("64 MiB", 1.5, 1.2, False),
    ]


def test_collectives_of_open_mpi_have_a_figure() -> None:
    times = {"fddp": Series((2.0,)), "gloo": Series((30.0,)), "MPI": Series((1.0,))}
    found = collectives.figures([collectives.Case("broadcast", 4, times)])
    assert [(f.what, f.value, f.reached) for f in found] == [("MPI / fddp", 0.5, False)]


def test_added_steps_of_a_backend_are_beyond_the_local_step() -> None:
    times = {LOCAL_MODULE: 1.0, "DDP, fddp": 2.0, "DDP, gloo": 5.0}
    case = backend_steps.Case("tiny", {name: Series((s, s)) for name, s in times.items()})
    assert case.added("DDP", "gloo").rounds_s == (4.0, 4.0)
    assert case.added_ratio("DDP") == (0.25, 0.25, 0.25)


# DDP, replicate, fddp


def _compared(rank: int, world_size: int) -> ddp_comparison.Results:
    return ddp_comparison.run_rank(1, ("small",))


OWN, ERROR = "this rank's own", "RuntimeError"
COMPARED = {  # DDP, replicate, fddp's DDP, GradSync
    "loss.backward()": ("mean", "mean", "mean", "mean"),
    "torch.autograd.grad": (OWN, OWN, "TransformError", "mean"),
    "torch.func.grad": (OWN, ERROR, OWN, "mean"),
    "torch.func.jvp": (OWN, ERROR, OWN, "mean"),
    "unused parameter, no option": (ERROR, ERROR, ERROR, "works, gradient None"),
    "bits over gloo": ("DDP's", "DDP's", "DDP's", "DDP's"),
}


@pytest.mark.nightly
def test_outcomes_of_the_comparison(ranks: RankPool) -> None:
    found, other = ranks.run(2, _compared)
    assert found == other
    outcomes = {
        case: tuple(outcome.partition(":")[0] for outcome in by_name.values())
        for case, by_name in found.cases.items()
    }
    assert outcomes == COMPARED
    for series in found.steps["small"].values():
        assert series.median_s > 0


def test_figures_of_memory() -> None:
    def peak(name: str, pss: float, rss: float) -> memory.Entry:
        return memory.Entry(name, "shm", pss, pss, rss)

    entries = (
        peak(FDDP, 420.0, 430.0),
        peak("fddp.DDP view", 303.0, 330.0),
        peak("DDP default", 300.0, 300.0),
        peak("DDP view", 300.0, 300.0),
    )
    found = memory.figures([memory.Result("tiny", "Tiny", 100, entries)])
    assert [(f.case, f.value, f.high, f.reached) for f in found] == [
        ("tiny, fddp.DDP view, shm", 1.01, 1.1, True),
        ("tiny, fddp, shm", 1.2, 1.3, False),
    ]


def test_figures_of_the_hosts_time_are_against_the_fastest_mode() -> None:
    times = {LOCAL_MODULE: 0.5, "DDP default": 4.0, "DDP view": 2.0, "value_and_grad": 1.0}
    steps = {name: Series((s,)) for name, s in {**times, "fddp.DDP view": 3.0}.items()}
    found = host_time.figures([host_time.Case(2, 40, steps)])
    assert [(f.case, f.value, f.reached) for f in found] == [
        ("2 ranks, 40 leaves, value_and_grad", 0.5, True),
        ("2 ranks, 40 leaves, fddp.DDP view", 1.5, False),
    ]


def test_figures_of_operators() -> None:
    times = {functional.PMEAN: Series((3.0, 2.0)), functional.SYNC: Series((2.0, 2.0))}
    (found,) = functional.figures({"tree": times})
    assert (found.value, found.reached) == (1.25, False)


def test_figures_of_packing_compare_like_with_like() -> None:
    small = {"pack_, foreach": 10.0, "pack_": 1.0, "unpack_, foreach": 20.0, "unpack_": 30.0}
    large = {"memcpy": 6.0, "copy_": 5.0, "pack_": 7.0, "unpack_": 8.0}
    given = {packing.SMALL: small, packing.CAST: small, packing.LARGE: large}
    found = packing.figures(
        {case: {k: Series((v,)) for k, v in series.items()} for case, series in given.items()}
    )
    assert [(f.value, f.reached) for f in found] == [
        *[(0.1, True), (1.5, False)] * 2,
        (pytest.approx(6 / 7), True),
        (0.75, False),
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_nothing_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["gpu"])
    gpu.main()
    assert capsys.readouterr().out == "no CUDA device here: nothing was measured\n"


# Each benchmark on ranks


def _tiny(name: str = "tiny") -> Workload:
    return stack(name, layers=2, width=8, rows=2)


def _transports() -> None:
    result = transports.run_rank((4, 65536), 2)
    assert (result.ranks, result.rounds) == (2, 2)
    gloo = {f"gloo, {n}{b}" for n in ("1 thread", "2 threads") for b in ("", ", barrier")}
    shm = {"shm", "shm, barrier", "shm, ordinary memory"}
    for case in result.cases:
        assert case.series.keys() == gloo | {"memcpy"} | (set() if result.reason else shm)
    assert len(transports.figures(result)) == (0 if result.reason else 2)


def _collectives() -> None:
    found, cases = collectives.run_rank((4, 65536), 2)
    assert (found, len(cases)) == (2, 2 * len(collectives.COLLECTIVES))
    assert all(case.series.keys() == {"fddp", "gloo", "dispatcher"} for case in cases)
    assert len(collectives.figures(cases)) == 1 + 2 * len(collectives.BOUNDED)


def _backend_steps() -> None:
    cases = backend_steps.run_rank(2, {"tiny": _tiny()})
    over_both = {f"{name}, {over}" for name in backend_steps.WRAPPERS for over in ("fddp", "gloo")}
    assert cases["tiny"].series.keys() == over_both | {LOCAL_MODULE}
    assert len(backend_steps.figures(cases)) == len(backend_steps.WRAPPERS)


def _peak_memory() -> None:
    """At least that of the model, its gradients and buckets."""
    set_bytes = sum(p.nbytes for p in WORKLOADS["conv"].build().parameters())
    peak, transport = memory.run_rank("conv", "DDP default")
    assert transport == "gloo"
    assert 2 * set_bytes < peak.settled <= peak.pss < 12 * set_bytes
    assert 2 * set_bytes < peak.rss < 12 * set_bytes


def _fixed_cost() -> None:
    case = fixed_cost.run_rank(2)
    assert len(fixed_cost.figures(case)) == 6
    name = fixed_cost.VALUE_AND_GRAD
    step, local = case.steps[name].rounds_s, case.steps[fixed_cost.FUNCTION].rounds_s
    assert case.added[name].rounds_s == tuple(a - b for a, b in zip(step, local, strict=True))


def _cost_of_a_parameter() -> None:
    cases = per_parameter.run_rank(2, (20, 40))
    assert [case.count for case in cases] == [20, 40]
    assert len(per_parameter.figures(cases)) == 4


def _virtual_ranks() -> None:
    cases = virtual_ranks.run_rank(2, [_tiny()])
    assert [case.virtual_ranks for case in cases] == [2, 3, 4]
    assert [case.sent_bytes / case.deterministic_bytes for case in cases] == [1.0, 1.5, 1.0]
    (figure,) = virtual_ranks.figures(cases)
    assert figure.bound == 1.3


def _noise() -> None:
    results = noise.run_rank(2, [_tiny()])
    (figure,) = noise.figures(results)
    assert figure.case == "tiny"
    assert [len(own.rounds_s) for own in results["tiny"].values()] == [2, 2]


def _operators() -> None:
    results = functional.run_rank(2, (2,))
    titles = ["300 leaves of 2 x 2, shm", "300 leaves of 2 x 2, c10d"]
    assert list(results) == [figure.case for figure in functional.figures(results)] == titles


def _device() -> None:
    """The benchmark for a device, on the CPU."""
    cpu = torch.device("cpu")
    with Stages(shown=False) as stages:
        packed = gpu.packing_times(cpu, 2, stages, leaves=3, numel=5)
        steps = gpu.step_times(_tiny(), cpu, 2, stages)
    cases = [figure.case for figure in gpu.figures(packed, {"tiny": steps})]
    modes = ("fddp", "fddp.DDP default", "fddp.DDP view")
    assert cases == [*["1 GiB"] * 4, *(f"tiny, {mode}" for mode in modes)]


RUNS = {
    "backend_steps": (_backend_steps, 2),
    "collectives": (_collectives, 2),
    "device": (_device, 1),
    "fixed_cost": (_fixed_cost, 2),
    "memory": (_peak_memory, 2),
    "noise": (_noise, 2),
    "operators": (_operators, 2),
    "per_parameter": (_cost_of_a_parameter, 1),
    "transports": (_transports, 2),
    "virtual_ranks": (_virtual_ranks, 2),
}
SAMPLE = "fixed_cost"  # of `make test`; the others run in `make nightly`


def _run(rank: int, world_size: int, name: str) -> None:
    RUNS[name][0]()


@pytest.mark.parametrize(
    "name",
    [name if name == SAMPLE else pytest.param(name, marks=pytest.mark.nightly) for name in RUNS],
)
def test_a_benchmark_runs(ranks: RankPool, name: str) -> None:
    ranks.run(RUNS[name][1], _run, name)
