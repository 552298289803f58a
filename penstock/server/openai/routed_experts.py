"""Encodes the routed experts of a completion's tokens for JSON."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def encode_routed_experts(ids: npt.NDArray[np.int16]) -> str:
    """Encode [tokens, layers, top_k] as the base64 of a .npy file, for ``numpy.load``."""
    import numpy as np  # imported only when requested

    file = io.BytesIO()
    np.save(file, ids, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()
