"""The web pages: a playground and dashboard at ``/``, the API reference at ``/docs``.

The files need no API key, but the data they fetch does. The files are small: they are read once and
served from memory, so they stay fast on a busy server.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse

router = APIRouter(include_in_schema=False)

TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
HEADERS = {
    # Pages load only these files and connect only to this server.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # revalidate every time
}


@dataclass(frozen=True)
class File:
    content: bytes
    type: str
    etag: str


@cache
def load_files() -> dict[str, File]:
    """Read the pages' files. Returns them by name."""
    files = {}
    for entry in resources.files(__name__).joinpath("static").iterdir():
        extension = entry.name.rpartition(".")[2]
        if extension in TYPES:
            content = entry.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
            files[entry.name] = File(content, TYPES[extension], etag)
    return files


def reply(request: Request, name: str) -> Response:
    file = load_files().get(name)
    if file is None:
        raise HTTPException(404)
    headers = {**HEADERS, "ETag": file.etag}
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


@router.get("/static/{name}")
async def static_file(request: Request, name: str) -> Response:
    return reply(request, name)
