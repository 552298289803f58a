"""MediaFetcher: decides which URLs of media may be read, and reads them.

A host's addresses are checked, and the connection goes to a checked address: a name that resolves
to another address a moment later changes nothing. Proxies of the environment are not used, since a
proxy would resolve the name again.
"""

from __future__ import annotations

import base64
import binascii
import concurrent.futures
import contextlib
import http.client
import ipaddress
import os
import re
import socket
import ssl
import stat
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

from penstock.config.media import MediaConfig
from penstock.confined.errors import PoolFull
from penstock.confined.scope import current_tenant, waiting
from penstock.protocol.errors import InputError

MAX_FETCHES = 256  # at once
MAX_TENANT_FETCHES = 32
MAX_REDIRECTS = 5
MAX_URL_LENGTH = 8192
CHUNK_BYTES = 64 * 1024
REDIRECTS = (301, 302, 303, 307, 308)
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
HEADERS = {"User-Agent": "penstock", "Accept": "*/*", "Accept-Encoding": "identity"}

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class FetchError(Exception):
    """Why a URL cannot be read, for its sender."""


class MediaFetcher:
    """Reads data URLs, and http(s) and file URLs as far as the operator allows. Thread-safe."""

    def __init__(self, config: MediaConfig) -> None:
        self.max_bytes = config.media_max_mb * 2**20
        self._config = config
        self._networks = [ipaddress.ip_network(each) for each in config.allowed_media_networks]
        self._lock = threading.Lock()
        self._num_running = Counter[str]()  # by tenant

    def read(self, url: str, where: str) -> bytes:
        """The content of a URL. Raises InputError for what is forbidden, missing or too large."""
        try:
            if url[:5].lower() == "data:":
                return self._read_data(url)
            if len(url) > MAX_URL_LENGTH or re.search(r"[\s\x00-\x1f\x7f\\]", url):
                raise FetchError("it is not a valid URL")
            parts = _split(url)
            if parts.scheme == "file":
                return self._read_file(parts)
            if parts.scheme in ("http", "https"):
                with self._counted():
                    return self._fetch(url)
        except FetchError as error:
            raise InputError(f"{where}: {error}", where) from error
        raise InputError(
            f"{where} must be a data URL such as data:image/png;base64,..., or an http or https "
            f"URL, got {url!r:.60}",
            where,
        )

    # -- data and file URLs

    def _read_data(self, url: str) -> bytes:
        head, comma, body = url.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise FetchError("a data URL must be in base64, such as data:image/png;base64,...")
        if len(body) > self.max_bytes * 4 // 3 + 4:
            raise self._too_large()
        try:
            return base64.b64decode(body, validate=True)
        except (binascii.Error, ValueError) as error:
            raise FetchError(f"it is not valid base64: {error}") from error

    def _read_file(self, parts: SplitResult) -> bytes:
        allowed = self._config.allowed_local_media_path
        if not allowed:
            raise FetchError("file URLs are not allowed here (--allowed-local-media-path)")
        if parts.netloc not in ("", "localhost"):
            raise FetchError("a file URL must not name a host: write file:///path")
        # One message whatever is wrong, so that nobody learns which other files exist.
        missing = FetchError("there is no such file below the allowed local media path")
        try:
            path = Path(unquote(parts.path)).resolve(strict=True)
            if not path.is_relative_to(Path(allowed).resolve(strict=True)):
                raise missing
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except (OSError, ValueError, RuntimeError):
            raise missing from None
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise missing
        with os.fdopen(file, "rb") as opened:
            data = opened.read(self.max_bytes + 1)
        if len(data) > self.max_bytes:
            raise self._too_large()
        return data

    # -- http and https

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Limit fetches at once: each holds a thread, and servers may be slow."""
        tenant = current_tenant()
        with self._lock:
            if (
                self._num_running.total() >= MAX_FETCHES
                or self._num_running[tenant] >= MAX_TENANT_FETCHES
            ):
                raise PoolFull("too many media are being fetched; try again later")
            self._num_running[tenant] += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_running -= Counter({tenant: 1})

    def _fetch(self, url: str) -> bytes:
        deadline = time.monotonic() + self._config.media_fetch_timeout
        for _ in range(MAX_REDIRECTS + 1):
            parts = _split(url)
            if parts.scheme not in ("http", "https"):
                raise FetchError("it redirects to a URL that is not http or https")
            answer = self._get(parts, deadline)
            if isinstance(answer, bytes):
                return answer
            if not self._config.allow_media_redirects:
                raise FetchError(
                    "it redirects, which is not allowed here (--allow-media-redirects): send the "
                    "URL that it redirects to"
                )
            url = urljoin(url, answer)
        raise FetchError(f"it redirects more than {MAX_REDIRECTS} times")

    def _get(self, parts: SplitResult, deadline: float) -> bytes | str:
        """The content of a URL, or where it redirects to."""
        host, port = self._check_host(parts)
        late = FetchError(
            f"fetching it takes longer than {self._config.media_fetch_timeout:g} s "
            "(--media-fetch-timeout)"
        )
        call = _Call()
        with waiting(call):
            try:
                addresses = self._resolve(call, host, port, deadline)
            except TimeoutError as error:
                raise late from error
            timer = threading.Timer(max(deadline - time.monotonic(), 0), call.cancel)
            timer.daemon = True
            timer.start()
            try:
                return self._exchange(call, parts, host, port, addresses, deadline)
            except (OSError, ValueError, http.client.HTTPException) as error:
                if time.monotonic() >= deadline:
                    raise late from error
                raise FetchError(f"it cannot be fetched: {type(error).__name__}") from error
            finally:
                timer.cancel()
                call.cancel()

    def _exchange(
        self,
        call: _Call,
        parts: SplitResult,
        host: str,
        port: int,
        addresses: list[Address],
        deadline: float,
    ) -> bytes | str:
        call.connect(addresses, port, deadline, host if parts.scheme == "https" else None)
        connection = http.client.HTTPConnection(host, port)
        connection.sock = call.socket
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("GET", path, headers=HEADERS | {"Host": parts.netloc})
        answer = connection.getresponse()
        if answer.status in REDIRECTS:
            return answer.getheader("Location") or ""
        if answer.status != 200:
            raise FetchError(f"its server answers with status {answer.status}")
        if (answer.length or 0) > self.max_bytes:
            raise self._too_large()
        data = bytearray()
        while chunk := answer.read(CHUNK_BYTES):
            data += chunk
            if len(data) > self.max_bytes:
                raise self._too_large()
        if answer.length or call.is_cancelled:
            raise ConnectionError("the connection ended early")
        return bytes(data)

    def _check_host(self, parts: SplitResult) -> tuple[str, int]:
        if parts.username is not None or parts.password is not None or not parts.hostname:
            raise FetchError("it must have a host, and no user or password")
        try:
            host = parts.hostname.encode("idna").decode()
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except (UnicodeError, ValueError) as error:
            raise FetchError("its host or port is not valid") from error
        domains = self._config.allowed_media_domains
        if domains is not None and host not in domains:
            raise FetchError(
                f"media from {host:.100} are not allowed here (--allowed-media-domains)"
            )
        return host, port

    def _resolve(self, call: _Call, host: str, port: int, deadline: float) -> list[Address]:
        """The host's addresses that may be connected to."""
        try:
            found = call.resolve(host, port, deadline)
        except TimeoutError:
            raise
        except (OSError, UnicodeError) as error:
            raise FetchError(f"its host {host:.100} cannot be resolved") from error
        addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
        allowed = [address for address in dict.fromkeys(addresses) if self._may_reach(address)]
        if not allowed:
            raise FetchError(
                f"its host {host:.100} has no public address; others are not allowed here "
                "(--allowed-media-networks)"
            )
        return allowed

    def _may_reach(self, address: Address) -> bool:
        if any(address in network for network in self._networks):
            return True
        if isinstance(address, ipaddress.IPv6Address):
            inner = address.ipv4_mapped or address.sixtofour
            if address in NAT64:
                inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
            if inner is not None:
                return self._may_reach(inner)
            if address.is_site_local:
                return False
        return address.is_global and not address.is_multicast and not address.is_reserved

    def _too_large(self) -> FetchError:
        return FetchError(f"it has more than {self._config.media_max_mb} MiB (--media-max-mb)")


class _Call:
    """A connection that another thread may cut."""

    def __init__(self) -> None:
        self.socket: socket.socket | None = None
        self.is_cancelled = False
        self._lock = threading.Lock()
        self._found = Future[list[Any]]()  # a host's addresses

    def resolve(self, host: str, port: int, deadline: float) -> list[Any]:
        """As `getaddrinfo`, which itself can neither be cut nor be given a time. Raises
        TimeoutError."""
        threading.Thread(target=self._ask, args=(host, port), daemon=True).start()
        try:
            return self._found.result(max(deadline - time.monotonic(), 0))
        except concurrent.futures.TimeoutError as error:  # before Python 3.11 another one
            raise TimeoutError from error

    def _ask(self, host: str, port: int) -> None:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except Exception as error:
            if self._found.set_running_or_notify_cancel():
                self._found.set_exception(error)
        else:
            if self._found.set_running_or_notify_cancel():
                self._found.set_result(found)

    def connect(
        self, addresses: list[Address], port: int, deadline: float, tls_name: str | None
    ) -> None:
        """Connect to the first address that answers. `tls_name`: the host of its certificate."""
        for index, address in enumerate(addresses):
            left_s = max(deadline - time.monotonic(), 0.001)
            try:
                found = socket.create_connection((str(address), port), left_s)
                break
            except OSError:
                if index == len(addresses) - 1:
                    raise
        with self._lock:
            self.socket = found
            if self.is_cancelled:
                self._cut()
        found.settimeout(max(deadline - time.monotonic(), 0.001))
        if tls_name is not None:
            secured = ssl.create_default_context().wrap_socket(found, server_hostname=tls_name)
            with self._lock:
                self.socket = secured
                if self.is_cancelled:
                    self._cut()

    def cancel(self) -> None:
        """Cut the connection: whoever reads from it gets an error."""
        with self._lock:
            self.is_cancelled = True
            self._found.cancel()
            self._cut()

    def _cut(self) -> None:
        if self.socket is not None:
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError as error:
        raise FetchError(f"it is not a valid URL: {error}") from error
