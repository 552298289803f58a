"""How much code there is: statements of `penstock/`, docstrings aside, now and at another commit.

python .ci/statements.py [COMMIT]
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

PACKAGE = "penstock"
MOST_LINES = 450  # of a file


def count(source: str) -> int:
    tree = ast.parse(source)
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    return sum(
        not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) for node in nodes
    )


def by_folder(sources: dict[str, str]) -> Counter[str]:
    counts = Counter[str]()
    for path, source in sources.items():
        parts = Path(path).parts
        counts[parts[1] if len(parts) > 2 else "."] += count(source)
    return counts


def here() -> dict[str, str]:
    return {str(path): path.read_text() for path in sorted(Path(PACKAGE).rglob("*.py"))}


def at(commit: str) -> dict[str, str]:
    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], check=True, capture_output=True, text=True
        ).stdout

    paths = git("ls-tree", "-r", "--name-only", commit, PACKAGE).splitlines()
    return {path: git("show", f"{commit}:{path}") for path in paths if path.endswith(".py")}


def main() -> None:
    sources = here()
    now, before = by_folder(sources), by_folder(at(sys.argv[1])) if sys.argv[1:] else Counter[str]()
    for folder in sorted(now | before):
        print(f"{folder:15} {now[folder]:6} {f'was {before[folder]}' if before else ''}")
    total = f"was {before.total()}, {now.total() / before.total():.3f} x" if before else ""
    print(f"{'in all':15} {now.total():6} {total}")
    for path, source in sources.items():
        if (lines := source.count("\n")) > MOST_LINES:
            print(f"{path} has {lines} lines, more than {MOST_LINES}")


if __name__ == "__main__":
    main()
