"""Reads and writes batch files in OpenAI's format: one request or result per line."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from penstock.protocol.errors import ConfigError, PenstockError

URLS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
    "/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank",
    "/v2/rerank", "/v2/embed",
)  # fmt: skip
MAX_LINE_BYTES = 64 * 2**20  # above the API's limit for bodies
_ID_PREFIX = "batch_req_"
OFF = (None, False, "false", "f", "0", "off", "no", "n")  # as the API reads booleans


# -- requests


@dataclass(frozen=True)
class BatchRequest:
    custom_id: str
    url: str
    body: bytes  # a JSON object


class BadLine(PenstockError):
    """A line that is not a valid request. Only this line fails."""

    def __init__(
        self, code: str, message: str, custom_id: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.custom_id = custom_id
        self.param = param


class _ModeFields(msgspec.Struct):
    stream: object = None
    background: object = None


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield lines that are not blank, numbered from 1. Holds one line in memory at a time.

    A line longer than `MAX_LINE_BYTES` is cut to that length plus one byte.
    """
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            rest = line
            while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
                rest = file.readline(MAX_LINE_BYTES + 1)
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")  # some editors write a BOM
            if not line.isspace():
                yield number, line


def parse_line(line: bytes) -> BatchRequest:
    """Parse the request on a line. Raises `BadLine`."""
    if len(line) > MAX_LINE_BYTES:
        raise BadLine("line_too_long", f"a line must have at most {MAX_LINE_BYTES} bytes")
    try:
        fields = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError as error:
        raise BadLine("invalid_json_line", "a line must contain a JSON object") from error
    except RecursionError as error:
        raise BadLine("invalid_json_line", "a line must be nested less deeply") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadLine("invalid_json_line", f"the line is not valid JSON: {error}") from error
    custom_id = _text(fields, "custom_id", None)
    method = _text(fields, "method", custom_id) if "method" in fields else "POST"
    if method != "POST":
        raise BadLine("invalid_method", f"method must be POST, got {method}", custom_id, "method")
    url = _text(fields, "url", custom_id)
    if url not in URLS:
        known = ", ".join(URLS)
        raise BadLine("invalid_url", f"url must be one of {known}, got {url}", custom_id, "url")
    return BatchRequest(custom_id, url, _body(fields, custom_id))


def _text(fields: dict[str, msgspec.Raw], name: str, custom_id: str | None) -> str:
    raw = _required(fields, name, custom_id)
    try:
        return msgspec.json.decode(raw, type=str)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        shown = bytes(raw)[:64].decode(errors="replace")
        message = f"{name} must be a string, got {shown}"
        raise BadLine("invalid_value", message, custom_id, name) from error


def _body(fields: dict[str, msgspec.Raw], custom_id: str) -> bytes:
    raw = _required(fields, "body", custom_id)
    try:
        modes = msgspec.json.decode(raw, type=_ModeFields)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        message = f"body must be a JSON object: {error}"
        raise BadLine("invalid_value", message, custom_id, "body") from error
    for name in ("stream", "background"):
        value = getattr(modes, name)
        if (value.lower() if isinstance(value, str) else value) not in OFF:
            message = f"{name} must be off: the answers of a batch come whole"
            raise BadLine("invalid_value", message, custom_id, f"body.{name}")
    return bytes(raw)


def _required(fields: dict[str, msgspec.Raw], name: str, custom_id: str | None) -> msgspec.Raw:
    if name not in fields:
        message = f"the line has no {name}; it must contain custom_id, url and body"
        raise BadLine("missing_required_parameter", message, custom_id, name)
    return fields[name]


# -- results


class LineResponse(msgspec.Struct):
    """The API's answer."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class LineError(msgspec.Struct):
    """Why a line never reached the API."""

    code: str
    message: str
    param: str | None
    line: int


class Result(msgspec.Struct):
    """One line of the output. Either `response` or `error` is null."""

    id: str
    custom_id: str | None
    response: LineResponse | None
    error: LineError | None

    @staticmethod
    def of_answer(custom_id: str, status: int, request_id: str, body: bytes) -> Result:
        return Result(
            _new_id(), custom_id, LineResponse(status, request_id, msgspec.Raw(body)), None
        )

    @staticmethod
    def of_bad_line(number: int, error: BadLine) -> Result:
        line_error = LineError(error.code, str(error), error.param, number)
        return Result(_new_id(), error.custom_id, None, line_error)


def _new_id() -> str:
    return _ID_PREFIX + uuid.uuid4().hex


_decode_result = msgspec.json.Decoder(Result).decode


class OutputError(PenstockError):
    """The output file cannot be written any more."""


class BatchOutput:
    """The output file, opened for appending, and the results of earlier runs in it.

    Each result is written at once and completely. If that fails, raises `OutputError`, and nothing
    more is written. A last line that a crash cut short is removed. Raises `ConfigError` for a file
    that holds anything but results.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answered: set[str] = set()  # custom_ids
        self.failed_lines: set[int] = set()  # numbers of lines that were not requests
        self.num_completed = 0  # answered without an error
        self._failure: OutputError | None = None
        try:
            self._file = path.open("ab+", buffering=0)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error
        try:
            self._read_results()
        except PenstockError:
            self._file.close()
            raise

    def write(self, result: Result) -> None:
        self._append(msgspec.json.encode(result) + b"\n")

    def close(self) -> None:
        self._file.close()

    def _append(self, data: bytes) -> None:
        if self._failure is not None:
            raise self._failure
        end = self._file.seek(0, os.SEEK_END)
        try:
            while data:  # an unbuffered write may be partial
                data = data[self._file.write(data) :]
        except OSError as error:  # such as a full disk
            self._failure = OutputError(
                f"cannot write {self.path}: {error.strerror}. The results in it are whole: make "
                "room, then run the same command again to continue"
            )
            with contextlib.suppress(OSError):  # otherwise the next run removes it
                self._file.truncate(end)
            raise self._failure from error

    def _read_results(self) -> None:
        end, last = 0, b"\n"  # of the complete lines so far
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if self._remember(line):
                    end, last = end + len(line), line
                elif line.endswith(b"\n") or not _may_be_cut_short(line):
                    raise ConfigError(
                        f"line {number} of {self.path} is not a result of a batch: choose another "
                        "output file, or remove that line to go on"
                    )
        self._file.truncate(end)
        if not last.endswith(b"\n"):
            self._append(b"\n")

    def _remember(self, line: bytes) -> bool:
        """Record the result on a line. Returns False if the line is not a result."""
        try:
            result = _decode_result(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return False
        if result.error is not None:
            self.failed_lines.add(result.error.line)
        elif result.custom_id is not None:
            self.answered.add(result.custom_id)
            self.num_completed += result.response is not None and result.response.status_code == 200
        return True


def _may_be_cut_short(line: bytes) -> bool:
    """Whether the line is a partial result. Nothing else is ever removed."""
    start = f'{{"id":"{_ID_PREFIX}'.encode()
    return line.startswith(start) or start.startswith(line)
