"""The report of `penstock bench serve`: computes the numbers and formats the table."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from penstock.cli.bench.common import describe_drafts, percentile, summarize_drafts
from penstock.cli.bench.load import LoadResult
from penstock.cli.bench.streams import StreamRecord

LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E"}


DEFAULT_PERCENTILES = (90.0, 99.0)


def summarize(
    result: LoadResult,
    goals_ms: Mapping[str, float],
    percentiles: Sequence[float] = DEFAULT_PERCENTILES,
) -> dict[str, Any]:
    """Compute all numbers of a run. Rates count completed requests over the whole run."""
    done = [record for record in result.records if record.error is None]
    elapsed = result.ended - result.started
    num_output = sum(record.num_output_tokens for record in done)
    summary = _of_all_kinds(result, done, goals_ms, percentiles)
    if result.drafts is not None and result.drafts.num_drafts:
        summary |= summarize_drafts(**asdict(result.drafts))
    return summary | {
        "token_counts": _source_of_counts(done),
        "total_cached_tokens": sum(record.num_cached_tokens or 0 for record in done),
        "total_output_tokens": num_output,
        "output_throughput": num_output / elapsed,
        "total_token_throughput": (summary["total_input_tokens"] + num_output) / elapsed,
        "ttft_ms": spread_ms([record.ttft for record in done], percentiles),
        "tpot_ms": spread_ms(
            [record.tpot for record in done if record.tpot is not None], percentiles
        ),
        "itl_ms": spread_ms([itl for record in done for itl in record.itls], percentiles),
        "requests": [_row(record, result.started) for record in result.records],
    }


def summarize_embeddings(
    result: LoadResult,
    goals_ms: Mapping[str, float],
    percentiles: Sequence[float] = DEFAULT_PERCENTILES,
) -> dict[str, Any]:
    """Compute the numbers of a run in which each request is one text and each answer a vector."""
    done = [record for record in result.records if record.error is None]
    summary = _of_all_kinds(result, done, goals_ms, percentiles)
    return summary | {
        "total_token_throughput": summary["total_input_tokens"] / summary["duration_s"],
        "requests": [_embedding_row(record, result.started) for record in result.records],
    }


def _of_all_kinds(
    result: LoadResult,
    done: Sequence[StreamRecord],
    goals_ms: Mapping[str, float],
    percentiles: Sequence[float],
) -> dict[str, Any]:
    """The numbers that every run has."""
    elapsed = result.ended - result.started
    delays = [record.sent - record.due for record in result.records]
    return {
        "completed": len(done),
        "failed": len(result.records) - len(done),
        "errors": _grouped_errors(result.records),
        "duration_s": elapsed,
        "max_concurrent_requests": result.max_in_flight,
        "total_input_tokens": sum(record.num_input_tokens or 0 for record in done),
        "request_throughput": len(done) / elapsed,
        **_goodput(result, done, goals_ms),
        "e2el_ms": spread_ms([record.e2e for record in done], percentiles),
        "start_delay_ms": spread_ms(delays, percentiles),
    }


def _goodput(
    result: LoadResult, done: Sequence[StreamRecord], goals_ms: Mapping[str, float]
) -> dict[str, Any]:
    if not goals_ms:
        return {}
    num_good = sum(_meets(record, goals_ms) for record in done)
    return {
        "goodput_ms": dict(goals_ms),
        "request_goodput": num_good / (result.ended - result.started),
        "good_share": num_good / len(result.records),
    }


def spread_ms(
    seconds: list[float], percentiles: Sequence[float] = DEFAULT_PERCENTILES
) -> dict[str, float] | None:
    """Summarize times in milliseconds, or None if nothing was measured."""
    if not seconds:
        return None
    ordered = sorted(value * 1e3 for value in seconds)
    return {
        "mean": statistics.fmean(ordered),
        "median": percentile(ordered, 0.5),
        "std": statistics.pstdev(ordered),
        **{f"p{share:g}": percentile(ordered, share / 100) for share in percentiles},
        "max": ordered[-1],
    }


def _grouped_errors(records: list[StreamRecord]) -> list[dict[str, Any]]:
    counts = Counter(record.error for record in records if record.error is not None)
    return [{"count": count, "error": error} for error, count in counts.most_common()]


def _source_of_counts(done: list[StreamRecord]) -> str:
    """How tokens were counted. Input tokens are known only from the server's usage."""
    num_reported = sum(record.usage is not None for record in done)
    if num_reported == len(done):
        return "usage"
    return "chunks" if num_reported == 0 else f"usage of {num_reported}, chunks of the others"


def _meets(record: StreamRecord, goals_ms: Mapping[str, float]) -> bool:
    reached = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2el": record.e2e}
    return all(reached[name] * 1e3 <= limit for name, limit in goals_ms.items())


def _row(record: StreamRecord, started: float) -> dict[str, Any]:
    """The JSON of one request. Times are from the start of the run."""
    row = _embedding_row(record, started)
    if record.error is not None:
        return row
    return row | {
        "ttft_ms": record.ttft * 1e3,
        "itls_ms": [itl * 1e3 for itl in record.itls],
        "num_output_tokens": record.num_output_tokens,
    }


def _embedding_row(record: StreamRecord, started: float) -> dict[str, Any]:
    """The JSON of one request that is not streamed."""
    row: dict[str, Any] = {"due_s": record.due - started, "start_s": record.sent - started}
    if record.error is not None:
        return row | {"error": record.error}
    return row | {
        "end_s": row["start_s"] + record.e2e,
        "num_input_tokens": record.num_input_tokens,
    }


def with_vllm_keys(document: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a report under the names that vLLM's reports have."""
    rate, prompts = document["request_rate"], document["completed"] + document["failed"]
    keys = {
        "backend": document["backend"],
        "model_id": document["model"],
        "num_prompts": prompts,
        "request_rate": "inf" if rate is None else rate,
        "duration": document["duration_s"],
        "request_goodput": document.get("request_goodput"),
    }
    for name in LATENCIES:
        for statistic, value in (document.get(f"{name}_ms") or {}).items():
            keys[f"{statistic}_{name}_ms"] = value
    return keys


def render(
    setting: Mapping[str, Any], summary: Mapping[str, Any], shown: Sequence[str] | None = None
) -> str:
    """Format the table. `shown`: names of the latencies; None: all."""
    models = [setting["model"], *setting["lora_modules"]]
    rows = [
        ("server", f"{setting['base_url']}, {', '.join(models)}"),
        ("requests", f"{setting['workload']}: {setting['prompts']} over {setting['backend']}"),
        ("load", describe_load(setting)),
        (
            "outcome",
            f"{summary['completed']} completed, {summary['failed']} failed in "
            f"{summary['duration_s']:.2f} s, at most {summary['max_concurrent_requests']} at once",
        ),
    ]
    if "ttft_ms" in summary:
        rows += [
            (
                "tokens",
                f"{summary['total_input_tokens']} in ({summary['total_cached_tokens']} cached), "
                f"{summary['total_output_tokens']} out, counted by {summary['token_counts']}",
            ),
            (
                "throughput",
                f"{summary['request_throughput']:.2f} requests/s, "
                f"{summary['output_throughput']:.1f} output tokens/s, "
                f"{summary['total_token_throughput']:.1f} total tokens/s",
            ),
        ]
    else:
        rate, tokens_rate = summary["request_throughput"], summary["total_token_throughput"]
        rows += [
            ("tokens", f"{summary['total_input_tokens']}, counted by usage"),
            ("throughput", f"{rate:.2f} texts/s, {tokens_rate:.1f} tokens/s"),
        ]
    if "num_draft_tokens" in summary:
        rows.append(("drafts", describe_drafts(summary)))
    if "request_goodput" in summary:
        goals = ", ".join(f"{k} <= {v:g} ms" for k, v in summary["goodput_ms"].items())
        goodput = f"{summary['request_goodput']:.2f} requests/s"
        rows.append(("goodput", f"{goodput} ({summary['good_share']:.0%}) with {goals}"))
    lines = [f"{name:<12}{text}" for name, text in rows]
    measured = next((summary[f"{key}_ms"] for key in LATENCIES if summary.get(f"{key}_ms")), None)
    columns = list(measured or ("mean", "median", "std", "p90", "p99", "max"))
    lines += ["", f"{'ms':<12}" + "".join(f"{column:>10}" for column in columns)]
    for key, title in LATENCIES.items():
        if f"{key}_ms" not in summary or (shown is not None and key not in shown):
            continue
        values = summary[f"{key}_ms"]
        cells = (f"{values[column]:.2f}" if values else "-" for column in columns)
        lines.append(f"{title:<12}" + "".join(f"{cell:>10}" for cell in cells))
    if summary["errors"]:
        lines.append("")
        lines += [f"failed: {item['count']} x {item['error']}" for item in summary["errors"]]
    return "\n".join(lines)


def describe_load(setting: Mapping[str, Any]) -> str:
    rate, most = setting["request_rate"], setting["max_concurrency"]
    if (ramp := setting.get("ramp_up")) is not None:
        sent = f"{ramp['start_rps']:g} to {ramp['end_rps']:g} requests/s, {ramp['strategy']}"
        return sent if most is None else f"{sent}, at most {most} in flight"
    sent = "all at once" if rate is None else f"{rate:g} requests/s"
    if rate is not None and setting["burstiness"] != 1:
        sent += f" (burstiness {setting['burstiness']:g})"
    return sent if most is None else f"{sent}, at most {most} in flight"
