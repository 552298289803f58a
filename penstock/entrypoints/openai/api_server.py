"""vLLM's older way to start the server: `python -m penstock.entrypoints.openai.api_server`."""

import sys

from penstock.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
