"""Triton's kernels run on the GPU if there is one, and in Triton's interpreter if not."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _same_numbers_in_any_order() -> None:
    """What a test draws does not depend on which tests ran before it."""
    torch.manual_seed(0)
