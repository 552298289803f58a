"""`penstock bench compare` says what changed, and by how much."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import main

REPORT: dict[str, Any] = {
    "benchmark": "serve",
    "penstock": "0.1.0",
    "model": "m",
    "request_rate": 4.0,
    "request_throughput": 10.0,
    "failed": 0,
    "ttft_ms": {"mean": 20.0, "p99": 100.0},
    "tpot_ms": None,
    "errors": [],
    "requests": [{"start_s": 1.0}],
}


def write(path: Path, **changes: Any) -> str:
    path.write_text(json.dumps(REPORT | changes))
    return str(path)


def test_numbers_are_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write(tmp_path / "a.json")
    changes: dict[str, Any] = {"ttft_ms": {"mean": 25.0, "p99": 90.0}, "request_throughput": 8.0}
    b = write(tmp_path / "b.json", model="n", request_rate=None, **changes)
    assert main(["bench", "compare", a, b, "--json", "-"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert {row["name"]: row["change"] for row in report["numbers"]} == {
        "request_throughput": pytest.approx(-0.2),
        "failed": None,
        "ttft_ms mean": pytest.approx(0.25),
        "ttft_ms p99": pytest.approx(-0.1),
    }
    assert report["differs"] == {"model": ["m", "n"], "request_rate": [4.0, None]}
    assert "ttft_ms mean" in captured.err
    assert "+25.0%" in captured.err


def test_a_threshold_makes_a_regression_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = write(tmp_path / "a.json")
    b = write(tmp_path / "b.json", request_throughput=9.0, ttft_ms={"mean": 21.0, "p99": 150.0})
    assert main(["bench", "compare", a, b, "--threshold", "20"]) == 1
    worse = [line for line in capsys.readouterr().out.splitlines() if line.endswith("worse")]
    assert [line.split("  ")[0] for line in worse] == ["ttft_ms p99"]
    assert main(["bench", "compare", a, b, "--threshold", "60"]) == 0
    assert main(["bench", "compare", b, a, "--threshold", "20"]) == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1]", "is no report"),
        ("{", "is not JSON"),
        ('{"benchmark": "latency"}', "compare two of one kind"),
        (None, "cannot read"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    tmp_path: Path, content: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "b.json"
    if content is not None:
        other.write_text(content)
    assert main(["bench", "compare", write(tmp_path / "a.json"), str(other)]) == 2
    assert message in capsys.readouterr().err
