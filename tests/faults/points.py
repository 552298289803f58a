"""Faults at named points of a real server: which functions can be made to fail, and how.

A point is ``module:function``. `FaultPoints.raise_at` makes one of its next calls raise, in
whichever process that happens; `stall_at` makes it stand still for a while, with all that its
process does; `hold_at` makes a coroutine wait until `release`.
"""

from __future__ import annotations

from pathlib import Path

from server.server_process import eventually

INJECT = Path(__file__).parent / "inject"


class FaultPoints:
    """Give `env` to a `ServerProcess`; `folder` is where its processes look for faults."""

    def __init__(self, folder: Path, *points: str) -> None:
        self._folder = folder
        self._points = points
        self.env = {
            "PYTHONPATH": str(INJECT),
            "FAULT_FOLDER": str(folder),
            "FAULT_POINTS": " ".join(points),
        }

    def raise_at(self, point: str, after_calls: int = 0) -> None:
        """Raise once, after so many more calls that are left alone."""
        self._arm(point, f"raise {after_calls}")

    def stall_at(self, point: str, seconds: float) -> None:
        self._arm(point, f"stall {seconds}")

    def hold_at(self, point: str) -> None:
        """Let its next call wait for `release`."""
        self._arm(point, "stall inf")

    def release(self, point: str) -> None:
        (self._folder / f"{point}.taken").unlink()

    def _arm(self, point: str, what: str) -> None:
        assert point in self._points
        scratch = self._folder / "scratch"
        scratch.write_text(what)
        scratch.rename(self._folder / point)  # whole, or not there

    def has_struck(self, point: str) -> bool:
        return not (self._folder / point).exists()

    def wait_for(self, point: str) -> None:
        eventually(lambda: self.has_struck(point))
