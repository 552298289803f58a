"""Media that are made to break servers: each must be refused."""

from __future__ import annotations

import base64
import http.server
import io
import random
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from PIL import Image
from tiny_vision import picture
from video_clips import video_file


class Hostile(NamedTuple):
    name: str
    kind: str  # of the part: image or video
    url: str


def data_url(data: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png_chunk(kind: bytes, data: bytes) -> bytes:
    check = struct.pack(">I", zlib.crc32(kind + data))
    return struct.pack(">I", len(data)) + kind + data + check


def png(width: int, height: int, body: bytes = b"0" * 99, *chunks: bytes) -> bytes:
    """A PNG of the size that its header says."""
    head = struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", head)
        + b"".join(chunks)
        + png_chunk(b"IDAT", zlib.compress(body))
        + png_chunk(b"IEND", b"")
    )


def long_animation(num_frames: int = 10_000) -> bytes:
    """A GIF of many frames, each of one pixel."""
    head = b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + b"\0\0\0\xff\xff\xff"
    frame = b"\x21\xf9\x04\0\x01\0\0\0\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0)
    return head + (frame + b"\x02\x02\x44\x01\0") * num_frames + b"\x3b"


def large_video() -> bytes:
    """A WebM file whose frames say that they have 16,383 x 16,383 pixels."""
    start = b"\x9d\x01\x2a"
    data = video_file(2, "webm", "libvpx")
    at = data.index(start) + len(start)
    return data[:at] + b"\xff\x3f\xff\x3f" + data[at + 4 :]


def whole_files() -> dict[str, bytes]:
    image = picture(64, 48)
    kinds = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF")
    return {kind: saved(image, kind) for kind in kinds}


FIXED: dict[str, tuple[str, str]] = {
    "svg": ("image", data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml")),
    "html": ("image", data_url(b"<html><img src=file:///etc/passwd></html>")),
    "eps": ("image", data_url(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n")),
    "pdf": ("image", data_url(b"%PDF-1.7\n" + bytes(200))),
    "empty": ("image", data_url(b"")),
    "no base64": ("image", "data:image/png;base64,!!!!"),
    "no comma": ("image", "data:image/png;base64"),
    "plain data": ("image", "data:image/png,abc"),
    "pixels": ("image", data_url(png(100_000, 100_000))),
    "wide": ("image", data_url(png(2**31 - 1, 1))),
    "no pixels": ("image", data_url(png(0, 5))),
    "too few bytes": ("image", data_url(png(4000, 4000))),
    "inflating": ("image", data_url(png(9000, 9000, bytes(10**7)))),
    "text chunk": (
        "image",
        data_url(png(9, 9, b"", png_chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(10**8))))),
    ),
    "long animation": ("image", data_url(long_animation(), "image/gif")),
    "video as image": ("image", data_url(video_file(2), "image/png")),
    "image as video": ("video", data_url(saved(picture(9, 9), "PNG"), "video/mp4")),
    "text as video": ("video", data_url(b"hello" * 99, "video/mp4")),
    "large video": ("video", data_url(large_video(), "video/webm")),
    "playlist": (
        "video",
        data_url(b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile:///etc/passwd\n"),
    ),
    "list of files": ("video", data_url(b"ffconcat version 1.0\nfile '/etc/passwd'\n")),
    "file": ("image", "file:///etc/passwd"),
    "file of a host": ("video", "file://localhost/etc/passwd"),
    "ftp": ("image", "ftp://example.com/a.png"),
    "script": ("image", "javascript:alert(1)"),
    "link-local": ("image", "http://169.254.169.254/latest/meta-data"),
    "link-local as a number": ("image", "http://2852039166/latest"),
    "link-local in IPv6": ("video", "http://[::ffff:169.254.169.254]/latest"),
    "this host": ("image", "http://0.0.0.0:1/a.png"),
    "user": ("image", "http://a:b@example.com/a.png"),
    "spaces": ("image", "http://exa mple.com/a.png"),
    "newline": ("image", "http://example.com/a\r\nHost: other"),
    "no host": ("image", "http:///a.png"),
    "port": ("image", "http://127.0.0.1:99999/a.png"),
    "long": ("image", f"http://example.com/{'a' * 9000}"),
}  # fmt: skip
PATHS = ("redirect", "missing", "error", "cut", "svg", "loop")


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers that no client should trust."""

    def do_GET(self) -> None:
        kind = self.path.strip("/")
        moved = {"redirect": "http://169.254.169.254/latest", "loop": "/loop"}
        self.send_response({"missing": 404, "error": 500}.get(kind, 302 if kind in moved else 200))
        if kind in moved:
            self.send_header("Location", moved[kind])
        if kind == "cut":
            self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write({"svg": b"<svg/>", "cut": b"\x89PNG"}.get(kind, b""))

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def hostile_web() -> Iterator[str]:
    """The address of a web server on this host."""
    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{web.server_port}"
    web.shutdown()


def hostile_media(count: int, web: str) -> list[Hostile]:
    """Every fixed case, then files that are cut or changed at random."""
    cases = [Hostile(name, kind, url) for name, (kind, url) in FIXED.items()]
    cases += [Hostile(path, "image", f"{web}/{path}") for path in PATHS]
    rng = random.Random(count)
    files = whole_files()
    clip = video_file(12)
    while len(cases) < count:
        name = rng.choice([*files, "MP4"])
        data = files.get(name, clip)
        left = bytearray(data[: rng.randrange(len(data) * 2 // 3)])
        way = "cut"
        if rng.random() < 0.3:
            way = "changed"
            left[: rng.randrange(4, 40)] = rng.randbytes(40)
        kind = "video" if name == "MP4" else "image"
        cases.append(Hostile(f"{name} {way} at {len(left)}", kind, data_url(bytes(left))))
    return cases[:count] if count < len(cases) else cases
