"""vLLM's place for pooling parameters."""

from penstock.protocol.pooling import PoolingParams

__all__ = ["PoolingParams"]
