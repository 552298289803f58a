"""The report as a Markdown page. Nothing that a commit or a model says becomes markup."""

from __future__ import annotations

import re

from analysis import RANKS, Analysed
from git_log import Commit

PARTS = ("what", "why", "impact", "risks", "advice")


def plain(text: str) -> str:
    """Text on one line, in which Markdown and HTML are shown instead of applied."""
    text = " ".join(text.split())
    text = "".join(each for each in text if each.isprintable())
    text = re.sub(r"[\\`*_\[\]<>|~&]|^[-+#=]", r"\\\g<0>", text)
    return re.sub(r"^(\d+)([.)])", r"\1\\\2", text).replace("://", "&#58;//")


def render(
    title: str, labels: dict[str, str], summary: str, analysed: list[Analysed], merges: list[Commit]
) -> str:
    labels = {key: plain(label) for key, label in labels.items()}
    lines = [f"# {labels['title']}: {plain(title)}", ""]
    if not analysed and not merges:
        return "\n".join([*lines, labels["empty"], ""])
    if summary:
        lines += [f"## {labels['summary']}", "", plain(summary), ""]
    in_order = sorted(analysed, key=lambda each: each.order)
    for rank in RANKS:
        ranked = [each for each in in_order if each.rank == rank]
        if not ranked:
            continue
        lines += [f"## {labels[rank]} ({len(ranked)})", ""]
        for each in ranked:
            lines += section(each, labels)
    if merges:
        lines += [f"## {labels['merges']} ({len(merges)})", ""]
        lines += [f"- `{commit.hash[:10]}` {plain(commit.subject)}" for commit in merges]
        lines.append("")
    return "\n".join(lines)


def section(each: Analysed, labels: dict[str, str]) -> list[str]:
    commit = each.commit
    facts = f"`{commit.hash[:10]}` · {plain(commit.author)} · {commit.size}"
    if each.answer is None:
        body = [f"*{plain(each.problem)}*"]
    else:
        body = [f"- **{labels[part]}:** {plain(each.answer[part])}" for part in PARTS]
    return [f"### {plain(commit.subject)}", "", facts, "", *body, ""]
