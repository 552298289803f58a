"""Reads the vision tower of a GGUF model, which is in a file of its own: `mmproj-...gguf`.

Such a file has the tower, its projector, and how images are prepared. Placeholder tokens and the
language model's sizes are in the model's own file, so the two are checked against each other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.loading.gguf.file import GGUFFile, read_gguf
from penstock.loading.gguf.mapping import MappedTensor, apply_rules
from penstock.loading.gguf.metadata import Metadata, fail, find_tensor
from penstock.loading.gguf.tower import GGUFTower, TowerFile
from penstock.loading.gguf.towers import TOWERS
from penstock.protocol.errors import ModelError

NONE = "none"  # in place of a path: the model takes text only
REMEDY = f"pass the model's own file with --mmproj, or --mmproj {NONE} to take text only"

_LAYER = re.compile(r"v\.blk\.([0-9]+)\.")
_TOKENS = "tokenizer.ggml.tokens"


def is_mmproj(path: Path) -> bool:
    """Whether a file in a model's folder has a vision tower, by its name."""
    return "mmproj" in path.name.lower()


def find_mmproj(model: Path, given: str | None) -> Path | None:
    """The file with the vision tower: `given`, or the one beside the model's file.

    Raises ModelError if `given` is no file, or if there are several beside the model.
    """
    if given == NONE:
        return None
    if given is not None:
        path = Path(given).expanduser()
        if not path.is_file():
            raise ModelError(f"mmproj must name a .gguf file, but there is no file {path}")
        return path
    found = sorted(path for path in model.parent.glob("*.gguf") if is_mmproj(path))
    if len(found) > 1:
        listed = ", ".join(str(path) for path in found)
        raise ModelError(
            f"{model} has several files with a vision tower beside it; pass one of them with "
            f"--mmproj, or --mmproj {NONE} to take text only: {listed}"
        )
    return found[0] if found and not is_mmproj(model) else None


def read_mmproj(path: Path) -> GGUFFile:
    """The file of a vision tower. Raises ModelError for another file or an unknown projector."""
    file = read_gguf(path)
    if file.metadata.get("general.architecture") != "clip":
        found = file.metadata.get("general.architecture")
        fail(file, f"not a vision tower (general.architecture clip, got {found!r:.80}): {REMEDY}")
    _tower_of(file)
    return file


def config_with_tower(
    config: Mapping[str, Any], model: GGUFFile, mmproj: GGUFFile
) -> dict[str, Any]:
    """The settings of the language model with those of the tower.

    Raises ModelError if the tower is not the model's, or its sizes are not those of its tensors.
    """
    known, tower = _tower_of(mmproj), TowerFile(mmproj)
    architecture = str(model.metadata.get("general.architecture"))
    if architecture not in known.classes:
        fail(
            mmproj,
            f"the vision tower of {known.models} does not fit {model.path}, whose "
            f"general.architecture is {architecture!r}, not {' or '.join(known.classes)}: {REMEDY}",
        )
    output = find_tensor(mmproj, known.output, num_dims=2).shape[known.output_dim]
    if output != config["hidden_size"]:
        fail(
            mmproj,
            f"the embeddings have {output} dimensions, but those of {model.path} have "
            f"{config['hidden_size']}: {REMEDY}",
        )
    _check_sizes(tower, known)
    vision = known.vision(tower)
    found = {
        **config,
        "architectures": [known.classes[architecture]],
        "vision_config": vision,
        **known.settings(tower),
        **_token_ids(known, model),
    }
    if known.mrope is not None:
        scaling = config["rope_scaling"] or {"rope_type": "default"}
        found["rope_scaling"] = {**scaling, **known.mrope, "mrope_section": _sections(model)}
    return found


def map_tower(mmproj: GGUFFile, config: Mapping[str, Any]) -> list[MappedTensor]:
    """The tower's tensors under Hugging Face names. Raises ModelError for missing ones."""
    known, tower = _tower_of(mmproj), TowerFile(mmproj)
    rules = known.rules(tower)
    for stem, rule in rules.items():
        name = stem if rule.is_whole else f"{stem}.weight"
        for layer in range(tower.depth) if "{n}" in name else (0,):
            own = name.replace("{n}", str(layer))
            if own not in mmproj.tensors:
                fail(mmproj, f"tensor {own!r} is missing: fetch or convert the file again")
    return apply_rules(
        mmproj,
        rules,
        config["vision_config"],
        lambda name: name in known.ignored,
        f"a vision tower of {known.models}",
    )


def processor_files(mmproj: GGUFFile, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What a checkpoint has in the JSON files of its processor, but for the tokenizer itself."""
    known, tower = _tower_of(mmproj), TowerFile(mmproj)
    made = known.processing(tower)
    return {
        "config.json": {name: config[name] for name in known.tokens if name in config},
        "preprocessor_config.json": {
            "image_processor_type": made.image_processor,
            "processor_class": made.processor,
            **made.images,
        },
        "processor_config.json": made.settings,
        "video_preprocessor_config.json": made.videos,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "extra_special_tokens": made.named_tokens,
        },
    }


def _tower_of(mmproj: GGUFFile) -> GGUFTower:
    kind = mmproj.metadata.get("clip.projector_type")
    if kind is None:  # of a file that has an encoder of audio, too
        kind = mmproj.metadata.get("clip.vision.projector_type")
    if not isinstance(kind, str) or kind not in TOWERS:
        fail(
            mmproj,
            f"the projector {kind!r:.80} (clip.projector_type) is not supported; supported: "
            f"{', '.join(TOWERS)}. --mmproj {NONE} takes text only",
        )
    return TOWERS[kind]


def _check_sizes(tower: TowerFile, known: GGUFTower) -> None:
    """Check what tensors of the model are made from, before it is built."""
    file = tower.file
    patches = find_tensor(file, "v.patch_embd.weight", num_dims=4).shape
    if patches != (tower.width, 3, tower.patch, tower.patch):
        fail(
            file,
            f"tensor 'v.patch_embd.weight' has the shape {list(patches)}, but by the metadata it "
            f"must be {[tower.width, 3, tower.patch, tower.patch]}",
        )
    layers = {int(found.group(1)) for name in file.tensors if (found := _LAYER.match(name))}
    if layers != set(range(tower.depth)):
        fail(
            file,
            f"metadata says {tower.depth} layers (clip.vision.block_count), but there are tensors "
            f"of {len(layers)}",
        )
    if tower.width % tower.num_heads:
        fail(
            file,
            f"{tower.width} dimensions (clip.vision.embedding_length) do not split into "
            f"{tower.num_heads} heads (clip.vision.attention.head_count)",
        )
    table = file.tensors.get("v.position_embd.weight")
    if table is None or table.name in known.ignored:
        return
    count = tower.side**2 + int("v.class_embd" in file.tensors)
    if table.shape[-2:] != (count, tower.width):
        fail(
            file,
            f"tensor {table.name!r} has the shape {list(table.shape)}, but by the metadata an "
            f"image has {count} places of {tower.width} dimensions",
        )


def _token_ids(known: GGUFTower, model: GGUFFile) -> dict[str, int]:
    tokens = model.metadata.get(_TOKENS)
    if not isinstance(tokens, list):
        fail(model, f"{_TOKENS} must be a list, got {tokens!r:.80}")
    found = {name: tokens.index(token) for name, token in known.tokens.items() if token in tokens}
    if "image_token_id" not in found:
        fail(
            model,
            f"{_TOKENS} has no {known.tokens['image_token_id']!r}, which stands for an image: the "
            f"file is of another model than the vision tower; {REMEDY}",
        )
    return found


def _sections(model: GGUFFile) -> list[int]:
    """The dimensions that rotate by time, by height and by width."""
    metadata = Metadata(model)
    sections = metadata.get("rope.dimension_sections")
    is_list = isinstance(sections, list) and all(type(size) is int for size in sections)
    if not is_list or len(sections) not in (3, 4) or any(sections[3:]):
        fail(
            model,
            f"metadata {metadata.prefix}.rope.dimension_sections must be three integers, and 0, "
            f"got {sections!r:.80}",
        )
    return list(sections[:3])
