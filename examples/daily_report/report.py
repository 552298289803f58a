"""Writes a report of a day's commits: each one analysed and ranked, on one Markdown page.

python examples/daily_report --repo path/to/repository --day 2026-11-17
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from datetime import date, timedelta
from pathlib import Path

from analysis import LABELS, Cache, Refused, Reporter
from backends import open_model
from git_log import Commit, GitError, commits_of_day
from page import render
from tqdm import tqdm


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="daily_report", description=__doc__)
    add = parser.add_argument
    add("--repo", type=Path, default=Path(), help="Git repository (default: this folder)")
    add("--day", type=date.fromisoformat, help="Day as YYYY-MM-DD (default: yesterday)")
    add("--revision", default="HEAD", help="Branch, tag or commit to start from (default: HEAD)")
    add("--language", default="English", help="Language of the report (default: English)")
    add("--model", help="Model to load, or to ask for at --url (default: the default model)")
    add("--url", help="Server with OpenAI's API, such as http://localhost:8000/v1, to use instead")
    add("--api-key-file", type=Path, help="File with the API key for --url")
    add("--max-diff-chars", type=int, default=6000, help="Characters of a diff that are read")
    add("--cache", type=Path, default=Path.home() / ".cache" / "penstock-daily-report")
    add("-o", "--output", type=Path, help="Page to write (default: report-DAY.md)")
    args = parser.parse_args(arguments)
    args.day = args.day or date.today() - timedelta(days=1)
    args.output = args.output or Path(f"report-{args.day}.md")
    if args.max_diff_chars < 0:
        parser.error(f"--max-diff-chars must be at least 0, got {args.max_diff_chars}")
    return args


async def report(args: argparse.Namespace, commits: list[Commit]) -> str:
    title = f"{args.repo.resolve().name}, {args.day}"
    merges = [commit for commit in commits if commit.is_plain_merge]
    to_analyse = [commit for commit in commits if not commit.is_plain_merge]
    if not to_analyse:
        return render(title, LABELS, "", [], merges)
    api_key = args.api_key_file.read_text().strip() if args.api_key_file else None
    async with open_model(args.model, args.url, api_key) as model:
        reporter = Reporter(model, Cache(args.cache), args.language, args.max_diff_chars)
        with tqdm(total=len(to_analyse), desc="Commits", unit="commit") as progress:
            analysed = await reporter.analyse(to_analyse, progress.update)
        summary, labels = await asyncio.gather(reporter.summarize(analysed), reporter.labels())
    if reporter.num_cached:
        print(f"{reporter.num_cached} answers came from {args.cache}", file=sys.stderr)
    return render(title, labels, summary, analysed, merges)


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    try:
        commits = commits_of_day(args.repo, args.day, args.revision)
        page = asyncio.run(report(args, commits))
        args.output.write_text(page, encoding="utf-8")
    except (GitError, Refused, OSError) as error:
        print(f"daily_report: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("daily_report: interrupted; run it again to continue", file=sys.stderr)
        return 130
    print(f"Wrote {args.output}: {len(commits)} commits", file=sys.stderr)
    return 0
