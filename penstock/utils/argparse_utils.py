"""FlexibleArgumentParser: what vLLM's scripts read their own flags with."""

from __future__ import annotations

import argparse
import sys
from typing import Any


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An `ArgumentParser` that takes `--max_model_len` for `--max-model-len`."""

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        given = args[0] if args and args[0] is not None else sys.argv[1:]
        return super().parse_known_args([*map(self._dashed, given)], *args[1:], **kwargs)

    def _dashed(self, argument: str) -> str:
        flag, equals, value = argument.partition("=")
        if not flag.startswith("--") or flag in self._option_string_actions:
            return argument
        return flag.replace("_", "-") + equals + value
