"""`penstock bench attention`: its notation, and one small run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

import pytest
import torch

from penstock.cli.bench.attention import Request, find_ops, parse_batch, prepare
from penstock.cli.main import build_parser, main
from penstock.ops.registry import Ops

FLAGS = ["--num-heads=4", "--num-kv-heads=2", "--head-dim=32", "--device=cpu"]


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_a_batch_is_written_in_groups() -> None:
    assert parse_batch("8q1s2k,q2k") == [Request(1, 2048)] * 8 + [Request(2048, 2048)]
    assert parse_batch("2q16s1k_q3") == [Request(16, 1024)] * 2 + [Request(3, 3)]
    assert Request(3, 5).num_scores == 3 + 4 + 5


@pytest.mark.parametrize("text", ["", "8", "q", "q1s", "0q1", "q0", "q4s2", "q1,,q2", "8x1"])
def test_what_is_no_batch_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        parse_batch(text)


def test_batches_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    iterations = ["--num-iters=2", "--num-iters-warmup=1", "--json=-"]
    assert main(["bench", "attention", "q40,2q1s50", "q1s20", *FLAGS, *iterations]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert [row["batch"] for row in report["batches"]] == ["q40,2q1s50", "q1s20"]
    assert [row["num_rows"] for row in report["batches"]] == [42, 1]
    assert all(row["us"]["p50"] > 0 for row in report["batches"])
    assert "q40,2q1s50" in captured.err


def test_the_call_that_is_measured_computes_attention() -> None:
    args = build_parser().parse_args(["bench", "attention", "q40,2q1s50", *FLAGS])
    ((_, requests),) = args.batches
    device, ops, _ = find_ops(args)
    results = []
    for backend in (ops, Ops("cpu")):
        torch.manual_seed(0)
        results.append(prepare(args, requests, device, backend)())
    ours, reference = results
    assert isinstance(ours, torch.Tensor)
    assert ours.shape == (42, 4, 32)
    torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-5)


def test_heads_that_do_not_divide_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "attention", "q4", "--num-heads=5", "--num-kv-heads=2"]) == 2
    assert "must be a multiple of num_kv_heads" in capsys.readouterr().err
