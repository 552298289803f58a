"""axe-core, which finds what keeps people from using a page: low contrast, fields without names.

npm's package, kept in the user's cache.
"""

from __future__ import annotations

import subprocess
import tarfile
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, expect

VERSION = "4.14.0"
FILE = Path.home() / ".cache" / "penstock-tests" / f"axe-{VERSION}.min.js"
GRAVE = ("serious", "critical")


@cache
def axe() -> str:
    if not FILE.exists():
        FILE.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FILE.parent) as scratch:
            command = ["npm", "pack", "--silent", f"axe-core@{VERSION}"]
            subprocess.run(command, cwd=scratch, check=True)
            with tarfile.open(Path(scratch) / f"axe-core-{VERSION}.tgz") as archive:
                archive.extract("package/axe.min.js", scratch, filter="data")
            (Path(scratch) / "package" / "axe.min.js").rename(FILE)
    return FILE.read_text()


def faults_of_server(page: Page, *parts: str) -> list[str]:
    """Those of the view that shows what the server does, with these parts on it."""
    page.get_by_role("button", name="Server", exact=True).click()
    for part in parts:
        expect(page.locator(part)).to_be_visible()
    return grave_faults(page, "header", "#server")


def grave_faults(page: Page, *parts: str) -> list[str]:
    """The rules that are broken and where, those that axe calls serious or critical. `parts` are
    selectors of what is examined; by default everything."""
    page.evaluate(axe())
    run = "async (parts) => (await axe.run(parts, { resultTypes: ['violations'] })).violations"
    found: list[dict[str, Any]] = page.evaluate(run, list(parts) or ["body"])
    return [
        f"{each['id']}: {node['html'][:120]}"
        for each in found
        if each["impact"] in GRAVE
        for node in each["nodes"]
    ]
