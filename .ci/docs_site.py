"""What mkdocs needs beside `docs/`: pages from elsewhere in the repository, and links to its files.

The Markdown files link to each other by paths that also work on the repository's own pages. Here
links that leave `docs/` lead to copies in the site.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from penstock.server.app import ROUTERS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# Pages of the site that are elsewhere in the repository.
PAGES = {
    "ARCHITECTURE.md": "contributing/architecture.md",
    "CONTRIBUTING.md": "contributing/contributing.md",
    "CHANGELOG.md": "reference/changelog.md",
    "SECURITY.md": "contributing/reporting.md",
    "README.md": "index.md",
    "examples/daily_report/README.md": "howto/daily-report.md",
}
HTTP = "reference/http.md"
ICON = ROOT / "penstock" / "server" / "playground" / "static" / "icon.svg"
COPIES = "files"  # where other files that pages link to are
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
FOLDER_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s#]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, path in PAGES.items():
        if path != "index.md":
            files.append(File.generated(config, path, abs_src_path=str(ROOT / source)))
    files.append(File.generated(config, HTTP, content=_http_reference()))
    files.append(File.generated(config, "images/icon.svg", abs_src_path=str(ICON)))
    for page in list(files.documentation_pages()):
        for target in _outside(page):
            path = _place(target)
            if target.is_file() and files.get_file_from_path(path) is None:
                files.append(File.generated(config, path, abs_src_path=str(target)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    source = _source(page.file)
    if source is None:
        return markdown

    def without_folder(match: re.Match[str]) -> str:
        target = _target(source, match[2])
        return match[1] if target is not None and target.is_dir() else match[0]

    def relative(match: re.Match[str]) -> str:
        target = _target(source, match[2])
        if target is None:
            return match[0]
        path = os.path.relpath(_place(target), os.path.dirname(page.file.src_uri))
        return f"{match[1]}{path}{match[3]}"

    return LINK.sub(relative, FOLDER_LINK.sub(without_folder, markdown))


def _source(file: File) -> Path | None:
    """The file in the repository; None for a page that is made here."""
    places = {path: ROOT / source for source, path in PAGES.items() if path != "index.md"}
    if file.src_uri == HTTP:
        return None
    return places.get(file.src_uri, DOCS / file.src_uri)


def _target(source: Path, link: str) -> Path | None:
    """The file that a relative link leads to, if there is one."""
    if "://" in link or link.startswith("mailto:"):
        return None
    target = (source.parent / link).resolve()
    return target if target.exists() and target.is_relative_to(ROOT) else None


def _place(target: Path) -> str:
    """The path of a file of the repository in the site."""
    path = target.relative_to(ROOT).as_posix()
    if path in PAGES:
        return PAGES[path]
    if target.is_relative_to(DOCS):
        return target.relative_to(DOCS).as_posix()
    return f"{COPIES}/{path}"


def _outside(page: File) -> list[Path]:
    source = _source(page)
    if source is None:
        return []
    found = [_target(source, link[2]) for link in LINK.finditer(source.read_text())]
    return [path for path in found if path is not None and not path.is_relative_to(DOCS)]


# -- the HTTP reference, from the OpenAPI schema

HTTP_INTRODUCTION = """\
# HTTP API

Written from the server's OpenAPI schema. A running server has it at `/openapi.json`, and at `/docs`
as a page on which requests can be tried. [Serving](../serving.md) explains what the tables do not.
"""


def _http_reference() -> str:
    app = FastAPI(title="Penstock")
    for router in ROUTERS:
        app.include_router(router)
    spec = app.openapi()
    groups: dict[str, list[str]] = {}
    for path, item in spec["paths"].items():
        for method, operation in item.items():
            (tag, *_) = operation.get("tags", ["Other"])
            entry = _operation(f"{method.upper()} {path}", operation)
            groups.setdefault(tag, []).append(entry)
    parts = [HTTP_INTRODUCTION]
    for tag, entries in groups.items():
        parts += [f"## {tag}\n", *entries]
    parts.append("## Objects\n")
    for name, schema in sorted(spec["components"]["schemas"].items()):
        body = _fields(schema) if "properties" in schema else f"{_type(schema)}\n"
        parts.append(f"### {name}\n\n{schema.get('description', '')}\n\n{body}")
    return "\n".join(parts)


def _operation(title: str, operation: dict[str, Any]) -> str:
    parts = [f"### `{title}`\n", operation.get("description", ""), ""]
    if parameters := operation.get("parameters"):
        parts += ["| parameter | type | |", "|---|---|---|"]
        for each in parameters:
            name = f"`{each['name']}` ({each['in']})"
            parts.append(f"| {name} | {_type(each['schema'])} | {_cell(each)} |")
        parts.append("")
    content = operation.get("requestBody", {}).get("content", {})
    bodies = [_type(each["schema"]) for each in content.values() if each.get("schema")]
    if bodies:
        parts.append(f"Body: {', '.join(dict.fromkeys(bodies))}\n")
    statuses: dict[str, list[str]] = {}  # by what is answered
    for status, response in operation["responses"].items():
        for each in response.get("content", {}).values():
            if each.get("schema"):
                statuses.setdefault(_type(each["schema"]), []).append(status)
    answers = [f"- {', '.join(dict.fromkeys(codes))}: {kind}" for kind, codes in statuses.items()]
    return "\n".join([*parts, *answers, ""])


def _fields(schema: dict[str, Any]) -> str:
    required = schema.get("required", [])
    rows = ["| field | type | |", "|---|---|---|"]
    for name, field in schema["properties"].items():
        about = ("Required. " if name in required else "") + _cell(field)
        rows.append(f"| `{name}` | {_type(field)} | {about} |")
    return "\n".join([*rows, ""])


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    members = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf")
    if members:
        return " or ".join(_type(member) for member in members if member.get("type") != "null")
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f"`{value}`" for value in values)
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return str(schema.get("type", "any"))


def _cell(schema: dict[str, Any]) -> str:
    text = " ".join(schema.get("description", "").split())
    return text.replace("|", "\\|").replace("<", "&lt;")
