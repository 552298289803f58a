"""Run as: python examples/daily_report --repo path/to/repository --day 2026-11-17"""

from __future__ import annotations

import sys

from report import main

if __name__ == "__main__":
    sys.exit(main())
