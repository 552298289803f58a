"""Which replica a client asks for, by the headers of its request."""

from __future__ import annotations

import hashlib
from contextvars import ContextVar
from typing import NamedTuple

from starlette.datastructures import Headers

RANK_HEADER = "X-data-parallel-rank"
SESSION_HEADER = "X-Session-ID"


class Route(NamedTuple):
    """What a client asks for."""

    rank: str | None = None  # the index of a replica, as it was sent: not checked yet
    session: str | None = None  # requests of one session should run on one replica


ANYWHERE = Route()
current_route: ContextVar[Route] = ContextVar("current_route", default=ANYWHERE)
"""The current request's wishes."""


def read_route(headers: Headers) -> None:
    """Set `current_route`."""
    rank, session = headers.get(RANK_HEADER), headers.get(SESSION_HEADER)
    if session is not None:
        session = hashlib.sha256(session.encode()).hexdigest()  # so that all have one length
    if rank is not None or session is not None:
        current_route.set(Route(rank, session))
