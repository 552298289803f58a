"""The chaos of tests/chaos.py in its shortest form."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos import run_chaos


@pytest.mark.parametrize(
    "seconds",
    [6.0, pytest.param(1200.0, marks=[pytest.mark.slow, pytest.mark.timeout(2000)])],
    ids=["seconds", "twenty_minutes"],
)
def test_whatever_happens_every_request_ends_once_and_right(seconds: float, tmp_path: Path) -> None:
    audit = run_chaos("tiny", seconds, 6, seed=4, picture=tmp_path / "chaos.png")
    print(audit.report())
    assert audit.complaints == []
    assert audit.ends["right"] > 0
    assert audit.faults.total() > 0
    assert (tmp_path / "chaos.png").stat().st_size > 0
