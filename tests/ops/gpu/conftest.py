"""Triton's kernels run on the GPU if there is one, and in Triton's interpreter if not."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
