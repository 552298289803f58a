"""The web pages: a playground and dashboard at ``/``, the API reference at ``/docs``.

The files need no API key, but the data they fetch does. The files are small: they are read once and
served from memory, so they stay fast on a busy server.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse

if TYPE_CHECKING:
    from importlib.abc import Traversable

router = APIRouter(include_in_schema=False)

TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "woff2": "font/woff2",
}
LICENSE = "text/plain; charset=utf-8"
VENDOR = "vendor/"  # libraries, in folders named after their versions: their files never change
HEADERS = {
    # Pages load only these files and connect only to this server. Attached images are data URLs.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
REVALIDATE = "no-cache"
KEEP = "public, max-age=31536000, immutable"


@dataclass(frozen=True)
class File:
    content: bytes
    type: str
    etag: str


@cache
def load_files() -> dict[str, File]:
    """Read the pages' files. Returns them by path below `static`."""
    return dict(_files_in(resources.files(__name__).joinpath("static"), ""))


def _files_in(folder: Traversable, prefix: str) -> Iterator[tuple[str, File]]:
    for entry in folder.iterdir():
        path = prefix + entry.name
        if entry.is_dir():
            yield from _files_in(entry, path + "/")
            continue
        content = entry.read_bytes()
        etag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
        kind = LICENSE if entry.name == "LICENSE" else TYPES[entry.name.rpartition(".")[2]]
        yield path, File(content, kind, etag)


def reply(request: Request, path: str) -> Response:
    file = load_files().get(path)
    if file is None:
        raise HTTPException(404)
    caching = KEEP if path.startswith(VENDOR) else REVALIDATE
    headers = {**HEADERS, "ETag": file.etag, "Cache-Control": caching}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.type)


@router.get("/")
async def page(request: Request) -> Response:
    return reply(request, "index.html")


@router.get("/docs")
async def docs(request: Request) -> Response:
    if request.app.openapi_url is None:  # --disable-fastapi-docs
        raise HTTPException(404)
    return reply(request, "docs.html")


@router.get("/docs/")
async def docs_elsewhere(request: Request) -> Response:
    return RedirectResponse("../docs")


@router.get("/favicon.ico")
async def icon(request: Request) -> Response:
    return reply(request, "icon.svg")


@router.get("/static/{path:path}")
async def static_file(request: Request, path: str) -> Response:
    return reply(request, path)
