"""What the reader knows about a kind of `mmproj` file: a vision tower and its projector."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.loading.gguf.file import GGUFFile
from penstock.loading.gguf.metadata import Metadata, fail, find_tensor
from penstock.loading.gguf.rules import Rule

# Tensors of a layer that all towers have, or many.
SPLIT = ("attn_q", "attn_k", "attn_v")
GATED = {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}
PLAIN = {"ffn_up": "fc1", "ffn_down": "fc2"}


class TowerFile(Metadata):
    """The keys of a vision tower, which begin with `clip`."""

    def __init__(self, file: GGUFFile) -> None:
        super().__init__(file)
        self.width = self.integer("vision.embedding_length")
        self.depth = self.integer("vision.block_count")
        self.num_heads = self.integer("vision.attention.head_count")
        self.patch = self.integer("vision.patch_size")

    @property
    def image_size(self) -> int:
        return self.integer("vision.image_size")

    @property
    def side(self) -> int:
        """Patches in a row of a square image."""
        return self.image_size // self.patch

    @property
    def is_swapped(self) -> bool:
        """Whether the MLP's matrices have each other's names, as in files of older converters."""
        return self.mlp_shape("ffn_down")[0] != self.width

    @property
    def intermediate_size(self) -> int:
        """From a tensor: older files say 0, or the size of the language model."""
        sizes = [size for size in self.mlp_shape("ffn_up") if size != self.width]
        return sizes[0] if sizes else self.width

    def mlp_shape(self, name: str) -> tuple[int, ...]:
        """The shape of a matrix of the first layer's MLP."""
        return find_tensor(self.file, f"v.blk.0.{name}.weight", num_dims=2).shape

    def merge(self, key: str, tensor: str, default: int = 2) -> int:
        """How many patches the side of a square has that becomes one row. `tensor` takes these."""
        size = self.integer(key, default=default)
        inputs = find_tensor(self.file, tensor, num_dims=2).shape[1]
        if inputs != self.width * size**2:
            fail(
                self.file,
                f"metadata clip.{key} is {size}, but tensor {tensor!r} has {inputs} columns, not "
                f"{size}^2 x {self.width}",
            )
        return size

    def rows(self, merge: int) -> int:
        """Of an image or a tile, after squares of patches became one each."""
        if self.side % merge:
            fail(
                self.file,
                f"{merge} patches must divide the {self.side} of an image's side "
                "(clip.vision.projector.scale_factor)",
            )
        return (self.side // merge) ** 2

    def activation(self, gelu: str) -> str:
        """`hidden_act`; `gelu` is the one that the models call so."""
        if self.get("use_silu"):
            return "silu"
        return gelu if self.get("use_gelu") else "quick_gelu"


@dataclass(frozen=True)
class ImageProcessing:
    """What checkpoints say in preprocessor_config.json and processor_config.json."""

    processor: str  # transformers' classes
    image_processor: str
    images: dict[str, Any]  # settings of the latter
    settings: dict[str, Any] = field(default_factory=dict)  # of the former
    named_tokens: dict[str, str] = field(default_factory=dict)  # that the tokenizer must name
    videos: dict[str, Any] = field(default_factory=dict)  # video_preprocessor_config.json


@dataclass(frozen=True)
class GGUFTower:
    """One `clip.projector_type`."""

    models: str  # for users
    classes: Mapping[str, str]  # Hugging Face class, by the text file's general.architecture
    rules: Callable[[TowerFile], dict[str, Rule]]
    vision: Callable[[TowerFile], dict[str, Any]]  # vision_config
    processing: Callable[[TowerFile], ImageProcessing]
    output: str  # the tensor with a row for each dimension of an embedding
    tokens: Mapping[str, str]  # settings of config.json that are ids, by the token
    settings: Callable[[TowerFile], dict[str, Any]] = field(default=lambda _: {})  # of config.json
    ignored: tuple[str, ...] = ()  # tensors that the tower does not need
    output_dim: Literal[0, 1] = 0
    mrope: dict[str, Any] | None = None  # settings of M-RoPE beside its sections


def normalization(tower: TowerFile) -> dict[str, Any]:
    return {
        "image_mean": tower.numbers("vision.image_mean", 3),
        "image_std": tower.numbers("vision.image_std", 3),
    }


def square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


def in_block(tower: TowerFile, path: str, names: dict[str, str]) -> dict[str, Rule]:
    """Rules of a layer, from names in the file to Hugging Face names within `path`."""
    if tower.is_swapped:
        other = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
        names = {other.get(stem, stem): name for stem, name in names.items()}
    return {f"v.blk.{{n}}.{stem}": Rule(f"{path}.{name}") for stem, name in names.items()}
