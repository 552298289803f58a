"""vLLM's older way to start the server: `python -m penstock.entrypoints.openai.api_server`."""

import sys
from typing import TYPE_CHECKING, NoReturn

from penstock.cli.main import main
from penstock.protocol.vllm_fields import refuse_class

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))

if not TYPE_CHECKING:  # which would take any name for one of this module

    def __getattr__(name: str) -> NoReturn:
        refuse_class(__name__, name)
