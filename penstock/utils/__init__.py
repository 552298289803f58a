"""vLLM's place for what its scripts use beside the engine."""

import uuid

from penstock.utils.argparse_utils import FlexibleArgumentParser
from penstock.utils.network_utils import get_open_port

__all__ = ["FlexibleArgumentParser", "get_open_port", "random_uuid"]


def random_uuid() -> str:
    """An id for a request."""
    return uuid.uuid4().hex
