"""vLLM's place for loggers."""

from logging import getLogger as init_logger

__all__ = ["init_logger"]
