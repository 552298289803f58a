"""The plots of docs/benchmarks.md have the numbers of its tables."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest
from scripts import load_script

plots = load_script("benchmarks/plots.py")


@pytest.mark.parametrize("name", plots.PLOTS)
def test_a_plot_has_the_numbers_of_the_page(name: str, tmp_path: Path) -> None:
    """Otherwise run python benchmarks/plots.py."""
    page = plots.PAGE.read_text()
    plot = plots.PLOTS[name](page)
    plots.draw(plot, tmp_path / "plot.svg")
    for path in (tmp_path / "plot.svg", plots.FOLDER / f"{name}.svg"):
        (kept,) = re.findall("<dc:description>(.*)</dc:description>", path.read_text())
        assert html.unescape(kept) == plot.description()
    assert f"(images/{name}.svg)" in page
