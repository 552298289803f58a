"""Log lines: one format, on standard error."""

from __future__ import annotations

import logging
import sys


def setup_logging(level: str) -> None:
    """Send the package's log lines of at least `level` to standard error."""
    logger = logging.getLogger("penstock")
    logger.setLevel(level.upper())
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(levelname).1s %(asctime)s %(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
