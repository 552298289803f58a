"""A stand-in for the Hugging Face Hub: repositories of files, over HTTP on this machine."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "1" * 40


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    repositories: dict[str, Path]

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, with_body: bool) -> None:
        path = self.path.partition("?")[0].strip("/")
        for name, folder in self.repositories.items():
            files = {file.name: file for file in folder.iterdir()}
            if path in (f"api/models/{name}", f"api/models/{name}/revision/main"):
                listed = [{"rfilename": file} for file in files]
                about = {"id": name, "sha": COMMIT, "siblings": listed, "private": False}
                return self._send(200, json.dumps(about).encode(), with_body)
            if path in (f"api/models/{name}/tree/{COMMIT}", f"api/models/{name}/tree/main"):
                tree = [
                    {"type": "file", "path": file, "size": place.stat().st_size, "oid": "0" * 40}
                    for file, place in files.items()
                ]
                return self._send(200, json.dumps(tree).encode(), with_body)
            for file, place in files.items():
                if path in (f"{name}/resolve/{COMMIT}/{file}", f"{name}/resolve/main/{file}"):
                    return self._send(200, place.read_bytes(), with_body)
        return self._send(404, b'{"error": "Repository not found"}', with_body)

    def _send(self, status: int, body: bytes, with_body: bool) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        else:
            self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def hub_of(repositories: dict[str, Path]) -> Iterator[str]:
    """Serve folders under the names of repositories. Gives the endpoint."""
    handler = type("Handler", (_Handler,), {"repositories": repositories})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
