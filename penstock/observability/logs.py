"""Decides the format of log lines and where they go: standard error."""

from __future__ import annotations

import logging
import sys


def setup_logging(level: str) -> None:
    """Log the package's messages to standard error, with minimum level `level`."""
    logger = logging.getLogger("penstock")
    logger.setLevel(level.upper())
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(levelname).1s %(asctime)s %(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
