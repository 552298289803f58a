"""vLLM's place for what its scripts use beside the engine."""

import uuid

from penstock.utils.argparse_utils import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser", "random_uuid"]


def random_uuid() -> str:
    """An id for a request."""
    return uuid.uuid4().hex
