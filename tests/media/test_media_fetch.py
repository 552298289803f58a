"""Fetching media: what may be read is read, and everything else is refused with the reason."""

from __future__ import annotations

import base64
import http.server
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from penstock.config.media import MediaConfig
from penstock.confined.errors import PoolFull
from penstock.confined.scope import JobScope
from penstock.media import fetch
from penstock.media.fetch import MediaFetcher
from penstock.protocol.errors import ConfigError, InputError

LOCAL = ["127.0.0.0/8", "::1/128"]


class Handler(http.server.BaseHTTPRequestHandler):
    """Paths say what is answered."""

    def do_GET(self) -> None:
        kind, _, rest = self.path[1:].partition("/")
        if kind == "redirect":
            self.send_response(302)
            self.send_header("Location", base64.urlsafe_b64decode(rest).decode())
            self.end_headers()
        elif kind == "status":
            self.send_error(int(rest))
        elif kind == "slow":
            self.send_response(200)
            self.end_headers()
            self.server.slow.wait(60)  # type: ignore[attr-defined]
        else:
            self.send_response(200)
            if kind != "unknown":
                self.send_header("Content-Length", rest)
            self.end_headers()
            self.wfile.write(b"x" * int(rest))

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def web() -> Iterator[Any]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.slow = threading.Event()  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.slow.set()  # type: ignore[attr-defined]
    server.shutdown()


def url_of(web: Any, path: str, host: str = "127.0.0.1") -> str:
    return f"http://{host}:{web.server_port}/{path}"


def redirect_to(web: Any, url: str) -> str:
    return url_of(web, "redirect/" + base64.urlsafe_b64encode(url.encode()).decode())


def fetcher(**options: Any) -> MediaFetcher:
    return MediaFetcher(MediaConfig(**{"allowed_media_networks": LOCAL, **options}))


def test_content_is_read(web: Any) -> None:
    for path in ("known/100000", "unknown/100000"):
        assert fetcher().read(url_of(web, path), "x") == b"x" * 100_000
    assert fetcher().read("data:text/plain;base64,YWJj", "x") == b"abc"


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/a", "http://localhost/a", "http://169.254.169.254/latest",
        "http://10.0.0.1/", "http://192.168.1.1/", "http://[::1]/", "http://[fe80::1]/",
        "http://[::ffff:127.0.0.1]/", "http://[64:ff9b::7f00:1]/", "http://[2002:7f00:1::]/",
        "http://0.0.0.0/", "http://0/", "http://2130706433/", "http://0x7f.1/",
        "http://100.64.0.1/", "http://224.0.0.1/", "http://[fec0::1]/", "http://[fd00::1]/",
        "http://[::127.0.0.1]/", "http://[::ffff:0:127.0.0.1]/", "http://0177.0.0.1/",
        "http://240.0.0.1/",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public_are_refused(url: str) -> None:
    with pytest.raises(InputError, match=r"no public address|cannot be resolved") as error:
        fetcher(allowed_media_networks=[]).read(url, "messages[0].content[1]")
    assert error.value.field == "messages[0].content[1]"


@pytest.mark.parametrize(
    "url",
    [
        "ftp://example.com/a", "gopher://127.0.0.1/", "javascript:alert(1)", "", "a.png",
        "http://user:pass@127.0.0.1/", "http://127.0.0.1\\@example.com/", "http:///a",
        "http://127.0.0.1 /", "http://127.0.0.1:99999/", "http://[::1", "http://a..b/",
        "http://127.0.0.1/" + "a" * 9000, "http://127.0.0.1/\r\nX: y", "data:text/plain,abc",
        "data:;base64,!!!!", "file:///etc/passwd",
    ],
)  # fmt: skip
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(InputError) as error:
        fetcher().read(url, "part")
    assert error.value.field == "part"


def test_a_name_cannot_change_its_address_after_the_check(
    web: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second answer of a hostile name server would lead inside."""
    asked = []

    def resolve(host: str, port: int, *args: Any, **kwargs: Any) -> list[Any]:
        asked.append(host)
        address = "93.184.216.34" if len(asked) == 1 else "127.0.0.1"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    connected = []

    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        connected.append(address[0])
        raise ConnectionRefusedError

    monkeypatch.setattr(fetch.socket, "getaddrinfo", resolve)
    monkeypatch.setattr(fetch.socket, "create_connection", connect)
    with pytest.raises(InputError, match="cannot be fetched"):
        fetcher(allowed_media_networks=[]).read("http://rebind.example/a", "x")
    assert asked == ["rebind.example"]
    assert connected == ["93.184.216.34"]


def test_only_allowed_domains_are_asked(web: Any) -> None:
    restricted = fetcher(allowed_media_domains=["localhost"])
    assert restricted.read(url_of(web, "known/3", "localhost"), "x") == b"xxx"
    for host in ("127.0.0.1", "a.localhost"):
        with pytest.raises(InputError, match="allowed-media-domains"):
            restricted.read(url_of(web, "known/3", host), "x")


def test_redirects_are_followed_only_if_allowed_and_each_is_checked(web: Any) -> None:
    to_content = redirect_to(web, url_of(web, "known/3"))
    with pytest.raises(InputError, match="allow-media-redirects"):
        fetcher().read(to_content, "x")
    following = fetcher(allow_media_redirects=True)
    assert following.read(to_content, "x") == b"xxx"
    for target, says in (
        ("http://169.254.169.254/latest", "no public address"),
        ("file:///etc/passwd", "not http"),
        (f"http://u:p@127.0.0.1:{web.server_port}/known/3", "no user"),
    ):
        with pytest.raises(InputError, match=says):
            following.read(redirect_to(web, target), "x")
    limited = fetcher(allow_media_redirects=True, allowed_media_domains=["127.0.0.1"])
    with pytest.raises(InputError, match="allowed-media-domains"):
        limited.read(redirect_to(web, url_of(web, "known/3", "localhost")), "x")
    loop = "/redirect/" + base64.urlsafe_b64encode(b"?").decode()
    with pytest.raises(InputError, match=r"more than 5 times|cannot be fetched"):
        following.read(url_of(web, loop[1:]), "x")


def test_size_time_and_status_are_limited(web: Any) -> None:
    for path in ("known/1048577", "unknown/1048577"):
        with pytest.raises(InputError, match="more than 1 MiB"):
            fetcher(media_max_mb=1).read(url_of(web, path), "x")
    big = base64.b64encode(bytes(2**20 + 3)).decode()
    with pytest.raises(InputError, match="more than 1 MiB"):
        fetcher(media_max_mb=1).read(f"data:;base64,{big}", "x")
    with pytest.raises(InputError, match=r"longer than 0\.2 s"):
        fetcher(media_fetch_timeout=0.2).read(url_of(web, "slow/"), "x")
    with pytest.raises(InputError, match="status 404"):
        fetcher().read(url_of(web, "status/404"), "x")


def test_a_slow_name_server_has_the_same_time_and_can_be_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, end = threading.Event(), threading.Event()

    def resolve(*args: Any, **kwargs: Any) -> list[Any]:
        asked.set()
        end.wait(120)
        raise OSError("no such host")

    monkeypatch.setattr(fetch.socket, "getaddrinfo", resolve)
    try:
        with pytest.raises(InputError, match=r"longer than 0\.1 s"):
            fetcher(media_fetch_timeout=0.1).read("http://slow.example/a", "x")
        asked.clear()
        scope = JobScope()
        with ThreadPoolExecutor(1) as threads:
            reading = threads.submit(
                scope.run, fetcher(media_fetch_timeout=600).read, "http://slow.example/a", "x"
            )
            assert asked.wait(120)
            scope.cancel()  # the client leaves
            with pytest.raises(CancelledError):
                reading.result(120)
    finally:
        end.set()


def test_a_client_cannot_take_all_fetches(web: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "MAX_TENANT_FETCHES", 1)
    shared = fetcher()
    url = url_of(web, "slow/")
    scope = JobScope("greedy")
    errors = []

    def read() -> None:
        try:
            scope.run(shared.read, url, "x")
        except InputError as error:
            errors.append(error)

    running = threading.Thread(target=read)
    running.start()
    while not shared._num_running["greedy"]:
        pass
    with pytest.raises(PoolFull):
        JobScope("greedy").run(shared.read, url_of(web, "known/3"), "x")
    assert JobScope("other").run(shared.read, url_of(web, "known/3"), "x") == b"xxx"
    scope.cancel()  # the client leaves
    running.join(60)
    assert errors
    assert not shared._num_running.total()


def test_files_are_read_below_the_allowed_path_only(tmp_path: Path) -> None:
    folder = tmp_path / "media"
    folder.mkdir()
    (folder / "a b.png").write_bytes(b"inside")
    (tmp_path / "secret").write_bytes(b"outside")
    (tmp_path / "media2").mkdir()
    (tmp_path / "media2" / "a").write_bytes(b"sibling")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "folder").mkdir()
    allowed = fetcher(allowed_local_media_path=str(folder))
    assert allowed.read(f"file://{folder}/a%20b.png", "x") == b"inside"
    for path in (
        f"{tmp_path}/secret", f"{folder}/../secret", f"{folder}/%2e%2e/secret", f"{folder}/link",
        f"{tmp_path}/media2/a", f"{folder}/loop", f"{folder}/folder", f"{folder}/none",
        f"{folder}/a%00b", "",
    ):  # fmt: skip
        with pytest.raises(InputError, match="no such file"):
            allowed.read(f"file://{path}", "x")
    with pytest.raises(InputError, match="must not name a host"):
        allowed.read(f"file://host{folder}/a%20b.png", "x")
    with pytest.raises(InputError, match="allowed-local-media-path"):
        fetcher().read(f"file://{folder}/a%20b.png", "x")


def test_networks_are_checked_at_the_start() -> None:
    with pytest.raises(ConfigError, match="allowed_media_networks"):
        MediaConfig(allowed_media_networks=["10.0.0.0/33"])
