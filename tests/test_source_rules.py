"""The source keeps to the rules of CONTRIBUTING.md that a program can check."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_LINES = 450


def test_no_file_is_too_long() -> None:
    paths = [path for folder in ("penstock", "tests") for path in (ROOT / folder).rglob("*.py")]
    lines = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in paths}
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}


def test_each_class_name_has_one_meaning() -> None:
    files: dict[str, list[str]] = defaultdict(list)
    for path in (ROOT / "penstock").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.ClassDef):
                files[node.name].append(str(path.relative_to(ROOT)))
    assert {name: places for name, places in files.items() if len(places) > 1} == {}
