"""vLLM's place for the parser of its scripts."""

from penstock.utils.argparse_utils import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser"]
