"""The chaos of tests/chaos.py in its shortest form."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos import Audit, run_chaos


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "seconds",
    [6.0, pytest.param(600.0, marks=pytest.mark.timeout(1200))],
    ids=["seconds", "ten_minutes"],
)
def test_so_it_does_with_several_replicas(seconds: float, tmp_path: Path) -> None:
    picture = tmp_path / "chaos.png"
    audit = run_chaos("tiny", seconds, 6, seed=5, picture=picture, num_replicas=3)
    print(audit.report())
    assert audit.complaints == []
    assert audit.ends["right"] > 0
    assert audit.faults.total() > 0


@pytest.mark.parametrize("leaks", ["server", "engine 2", "engine 3", "none"])
def test_the_audit_finds_whose_memory_grows(leaks: str) -> None:
    audit, mib = Audit(), 2**20
    for second in range(200):
        grown = second * mib // 4
        sizes = {"server": 100, "engine 1": 50, "engine 2": 300, "engine 3": 300}
        rss = {name: size * mib + grown * (name == leaks) for name, size in sizes.items()}
        # The second engine is the successor of the first, and larger: that is no growth.
        living = {1, 3} if second < 20 else {2, 3}
        engines = {pid: rss[f"engine {pid}"] for pid in living}
        audit.look(float(second), rss["server"], engines, 30)
    audit.check_process(30, 30)
    assert [complaint.split("'")[0] for complaint in audit.complaints] == (
        [] if leaks == "none" else [f"the {leaks}"]
    )


def test_an_engine_that_lived_for_seconds_is_not_judged() -> None:
    audit = Audit()
    for second in range(120):
        audit.look(float(second), 2**27, {second // 20 + 1: (second % 20) * 2**27}, 30)
    assert list(audit.memory()) == ["server"]
