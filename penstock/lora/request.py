"""vLLM's place for LoRARequest."""

from penstock.protocol.adapter import LoRARequest

__all__ = ["LoRARequest"]
