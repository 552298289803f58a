"""vLLM's place for what its scripts print vectors with."""

from collections.abc import Sequence

__all__ = ["print_embeddings"]


def print_embeddings(embeds: Sequence[float], prefix: str = "Embeddings") -> None:
    """Print the first elements of a vector, and its size."""
    shown = ", ".join(str(value) for value in embeds[:4])
    print(f"{prefix}: [{shown}{', ...' if len(embeds) > 4 else ''}] (size={len(embeds)})")
