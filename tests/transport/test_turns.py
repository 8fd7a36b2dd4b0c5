"""Ranks as threads of which one computes at a time."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch

import fddp
from fddp.extend import LoopbackGroup, in_turns


def drawn() -> list[float]:
    return [float(torch.rand(())), random.random(), float(np.random.rand())]


def test_each_rank_has_the_callers_random_numbers() -> None:
    def run(group: LoopbackGroup) -> list[list[float]]:
        found = [drawn()]
        for _ in range(3):
            fddp.psum(torch.ones(()))
            found.append(drawn())
        return found

    one, two, three = in_turns(3, run)
    assert one == two == three
    # They begin in the state of the caller's, which stays as it was.
    assert one[0] == drawn()


def test_one_rank_computes_at_a_time() -> None:
    computing, most = [0], []

    def run(group: LoopbackGroup) -> None:
        for _ in range(20):
            computing[0] += 1
            most.append(computing[0])
            threading.Event().wait(1e-4)
            computing[0] -= 1
            fddp.psum(torch.ones(()))

    in_turns(3, run)
    assert max(most) == 1


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_ranks_may_each_use_what_belongs_to_the_process() -> None:
    def run(group: LoopbackGroup) -> torch.Tensor:
        total = torch.ones(2)
        for step in range(5):
            with fddp.virtual_rng(step, 0):
                noise = torch.rand(2)
            total = fddp.psum(torch.func.jvp(torch.sin, (total,), (noise,))[1])
        return total

    one, two = in_turns(2, run)
    assert torch.equal(one, two)


def test_it_is_the_default_group_of_its_rank() -> None:
    assert in_turns(2, lambda group: fddp.extend.resolve(None) is group) == [True, True]
    with pytest.raises(fddp.FddpError, match="no process group"):
        fddp.psum(torch.ones(()))


def test_the_first_error_is_raised() -> None:
    def run(group: LoopbackGroup) -> None:
        if group.rank == 1:
            raise LookupError("no such key")
        fddp.psum(torch.ones(()))

    with pytest.raises((LookupError, fddp.FddpError)) as raised:
        in_turns(2, run)
    assert isinstance(raised.value, LookupError)


def test_a_wait_on_another_thread_lets_others_compute() -> None:
    def run(group: LoopbackGroup) -> float:
        found: list[torch.Tensor] = []
        sync = fddp.GradSync({"w": torch.ones(())}, group=group)

        def elsewhere() -> None:
            found.append(sync({"w": torch.tensor(float(group.rank))})["w"])

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        sync.close()
        return float(found[0])

    assert in_turns(3, run) == [1.0, 1.0, 1.0]
