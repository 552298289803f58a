"""`penstock bench sweep` runs every combination once, also over several starts."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from fake_openai import FakeServer, complete

from penstock.cli.bench.sweep import pareto_front
from penstock.cli.main import main

SMALL = ("--num-prompts", "2", "--input-len", "5", "--output-len", "4")


def row(total: float | None, tpot_ms: float | None) -> dict[str, Any]:
    return {"output_throughput": total, "tpot_ms_median": tpot_ms}


def test_the_front_holds_what_nothing_beats() -> None:
    rows = [row(100, 10), row(200, 20), row(150, 25), row(None, None), row(100, 10), row(90, 11)]
    assert pareto_front(rows) == [0, 1, 4]


def test_every_combination_is_run_and_a_second_sweep_runs_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeServer(complete) as server:

        def sweep(*vary: str) -> int:
            flags = ("--", "--base-url", server.url, *SMALL)
            return main(["bench", "sweep", "-o", str(tmp_path / "out"), "--vary", *vary, *flags])

        assert sweep("request-rate=200,inf") == 0
        num_first = len(server.bodies)
        assert sweep("request-rate=200,inf") == 0
        assert len(server.bodies) == num_first, "all results are there"
        (tmp_path / "out" / "request-rate=inf.json").unlink()
        assert sweep("request-rate=200,inf") == 0
        assert num_first < len(server.bodies) < 2 * num_first
    rows = list(csv.DictReader((tmp_path / "out" / "sweep.csv").open()))
    assert [row["request-rate"] for row in rows] == ["200", "inf"]
    assert {row["completed"] for row in rows} == {"2"}
    document = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert document["pareto"]
    assert (tmp_path / "out" / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert "output_throughput" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--vary-serve", "max-num-seqs=1,2"], "needs --serve"),
        (["--vary", "request-rate=1", "request-rate=2"], "request-rate is varied twice"),
    ],
)
def test_sweeps_that_cannot_be_run_are_refused(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "sweep", "-o", str(tmp_path), *flags]) == 2
    assert message in capsys.readouterr().err


def test_results_of_other_flags_are_not_taken_for_these(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.json").write_text('{"sweep": {"flags": ["--num-prompts", "9"]}}')
    assert main(["bench", "sweep", "-o", str(tmp_path), "--", *SMALL]) == 2
    assert "is a result of other flags" in capsys.readouterr().err


@pytest.mark.slow
def test_a_server_is_started_for_each_combination(default_model: str, tmp_path: Path) -> None:
    serving = ("--serve", default_model, "--vary-serve", "max-num-seqs=1,2")
    flags = (*serving, "--vary", "max-concurrency=2", "--", *SMALL)
    assert main(["bench", "sweep", "-o", str(tmp_path), *flags]) == 0
    names = {f"max-num-seqs={n}_max-concurrency=2.json" for n in (1, 2)}
    assert names <= {path.name for path in tmp_path.iterdir()}
