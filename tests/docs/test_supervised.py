"""The example of a supervisor: workers are killed, others go on, and spare ones join."""

from __future__ import annotations

import pytest

from examples import supervised


@pytest.mark.nightly
def test_the_bits_are_those_of_a_run_without_losses(capsys: pytest.CaptureFixture[str]) -> None:
    assert supervised.main(["--kills", "3", "--steps", "200"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "same bits"
    assert sum("lost worker" in line for line in lines) == 3
    assert any(line.endswith("workers [1, 2, 3]") for line in lines)
