"""Routes of vLLM's server: each is one here too, or a 404 says what to do about it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.config.docs import render_vllm_routes
from penstock.config.vllm_routes import ROUTES, why_nothing
from penstock.server.app import ROUTERS
from penstock.server.openai.tokenize import info_router

LISTED = (Path(__file__).parent / "vllm_routes.txt").read_text()
THEIRS = re.findall(r"^(?!#).*$", LISTED, re.MULTILINE)
PATHS = [path for line in THEIRS for path in line.split()]
OURS = {getattr(route, "path", None) for router in ROUTERS for route in router.routes}
ON_REQUEST = {getattr(route, "path", None) for route in info_router.routes}


@pytest.mark.parametrize("path", PATHS)
def test_every_route_of_vllm_is_ours_or_in_the_table(path: str) -> None:
    assert (path in OURS) + (path in ROUTES) == 1


def test_the_table_names_no_route_of_ours() -> None:
    assert not OURS & ROUTES.keys()
    assert ROUTES.keys() >= ON_REQUEST, "unless a flag adds it"


def test_remedies_name_routes_that_there_are() -> None:
    for text in ROUTES.values():
        for path in re.findall(r"(/[a-z0-9_/{}]*[a-z0-9}])", text):
            assert path in OURS, path


def test_a_path_that_nobody_knows_is_answered_without_advice() -> None:
    assert why_nothing("/nowhere") == "there is nothing at /nowhere; /docs lists what there is"


def test_the_migration_page_shows_the_table() -> None:
    page = Path(__file__).parents[2] / "docs" / "moving-from-vllm.md"
    assert render_vllm_routes() in page.read_text(), (
        "run: python -m penstock.config.docs vllm-routes"
    )
