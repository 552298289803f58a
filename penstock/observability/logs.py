"""Decides the format of log lines and where they go: standard error."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Literal

LogFormat = Literal["text", "json"]
TEXT = "%(levelname).1s %(asctime)s %(name)s: %(message)s"
FIELDS = "fields"  # of a record, by `extra={FIELDS: {...}}`: what its message says, as values


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, and the record's fields."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def setup_logging(level: str, log_format: LogFormat = "text") -> None:
    """Log the package's messages to standard error, with minimum level `level`.

    So are those of uvicorn and OpenTelemetry, with their own levels.
    """
    logging.getLogger("penstock").setLevel(level.upper())
    formatter = JsonFormatter() if log_format == "json" else logging.Formatter(TEXT)
    for name in ("penstock", "uvicorn", "opentelemetry"):
        logger = logging.getLogger(name)
        if not logger.handlers:
            logger.addHandler(logging.StreamHandler(sys.stderr))
            logger.propagate = False
        for handler in logger.handlers:
            handler.setFormatter(formatter)
