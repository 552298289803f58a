"""The version of this package. Nodes of one engine compare it."""

from __future__ import annotations

VERSION = "0.1.0"
