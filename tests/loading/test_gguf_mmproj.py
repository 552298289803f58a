"""A GGUF model's vision tower is found, checked against the model, and read under its names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_builder import HIDDEN, VOCAB, add_value, write_gguf

from penstock.config import LoadConfig, ModelConfig
from penstock.loading.checkpoint import open_checkpoint
from penstock.loading.source import ModelSource, resolve_source
from penstock.protocol.errors import ModelError

WIDTH, FFN, DEPTH, PATCH, SIDE = 32, 48, 2, 14, 4
TOKENS = ["<image>", *(f"token{i}" for i in range(1, VOCAB))]
Tensors = dict[str, np.ndarray]


def tower_tensors() -> Tensors:
    """Of Idefics 3."""
    shapes: dict[str, tuple[int, ...]] = {
        "v.patch_embd.weight": (WIDTH, 3, PATCH, PATCH),
        "v.patch_embd.bias": (WIDTH,),
        "v.position_embd.weight": (SIDE**2, WIDTH),
        "v.post_ln.weight": (WIDTH,),
        "v.post_ln.bias": (WIDTH,),
        "mm.model.fc.weight": (HIDDEN, 4 * WIDTH),
    }
    matrices = {f"attn_{name}": (WIDTH, WIDTH) for name in ("q", "k", "v", "out")}
    matrices |= {"ffn_up": (FFN, WIDTH), "ffn_down": (WIDTH, FFN)}
    for layer in range(DEPTH):
        for name, shape in {**matrices, "ln1": (WIDTH,), "ln2": (WIDTH,)}.items():
            shapes[f"v.blk.{layer}.{name}.weight"] = shape
            shapes[f"v.blk.{layer}.{name}.bias"] = shape[:1]
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def write_tower(path: Path, tensors: Tensors | None = None, **changes: Any) -> Path:
    """`changes`: of metadata by the end of its key; None leaves a key out."""
    values: dict[str, Any] = {
        "general.architecture": "clip",
        "clip.projector_type": "idefics3",
        "clip.use_gelu": True,
        "clip.vision.embedding_length": WIDTH,
        "clip.vision.feed_forward_length": FFN,
        "clip.vision.block_count": DEPTH,
        "clip.vision.attention.head_count": 2,
        "clip.vision.attention.layer_norm_epsilon": 1e-6,
        "clip.vision.image_size": PATCH * SIDE,
        "clip.vision.patch_size": PATCH,
        "clip.vision.image_mean": [0.5, 0.5, 0.5],
        "clip.vision.image_std": [0.5, 0.5, 0.5],
        "clip.vision.projector.scale_factor": 2,
    }
    for end, value in changes.items():
        (key,) = [each for each in values if each.endswith(f".{end}")]
        values[key] = value
    writer = gguf.GGUFWriter(path, values.pop("general.architecture"))
    for key, value in values.items():
        add_value(writer, key, value)
    for name, tensor in (tower_tensors() if tensors is None else tensors).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def resolve(path: Path, **options: Any) -> ModelSource:
    return resolve_source(ModelConfig(model=str(path), **options), LoadConfig())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    path = folder / "model.gguf"
    write_gguf(path, metadata={"tokenizer.ggml.tokens": TOKENS})
    return path


def names_of(source: ModelSource) -> list[str]:
    return [name for name in open_checkpoint(source, LoadConfig()).names() if "vision" in name]


@pytest.mark.parametrize("name", ["mmproj-F16.gguf", "model-mmproj.gguf", "Model.MMPROJ.gguf"])
def test_the_tower_beside_a_model_is_read_with_it(model: Path, name: str) -> None:
    write_tower(model.with_name(name))
    for path in (model, model.parent):
        source = resolve(path)
        assert source.path == model
        assert source.config["architectures"] == ["Idefics3ForConditionalGeneration"]
        assert source.config["image_token_id"] == 0
        assert source.config["vision_config"]["intermediate_size"] == FFN
        assert "model.vision_model.encoder.layers.1.mlp.fc2.weight" in names_of(source)
    alone = resolve(model, mmproj="none")
    assert alone.config["architectures"] == ["LlamaForCausalLM"]
    assert not names_of(alone)
    assert alone.fingerprint != source.fingerprint


def test_a_tower_elsewhere_is_named(model: Path, tmp_path: Path) -> None:
    path = write_tower(tmp_path / "tower.gguf")
    assert resolve(model).mmproj is None
    source = resolve(model, mmproj=str(path))
    assert source.mmproj is not None
    assert source.mmproj.path == path
    with pytest.raises(ModelError, match=r"there is no file .*missing\.gguf"):
        resolve(model, mmproj=str(tmp_path / "missing.gguf"))


def test_one_of_several_towers_must_be_named(model: Path) -> None:
    paths = [write_tower(model.with_name(f"mmproj-{name}.gguf")) for name in ("F16", "F32")]
    with pytest.raises(ModelError, match=r"--mmproj none to take text only: .*F16.*F32"):
        resolve(model)
    source = resolve(model, mmproj=str(paths[1]))
    assert source.mmproj is not None
    assert source.mmproj.path == paths[1]


def test_a_tower_alone_is_no_model(tmp_path: Path) -> None:
    path = write_tower(tmp_path / "mmproj.gguf")
    for given in (path, tmp_path):
        with pytest.raises(ModelError, match="pass the language model's file"):
            resolve(given)


def test_matrices_with_each_others_names_are_told_apart(model: Path) -> None:
    """Converters of early 2025 called the MLP's first matrix down."""
    other = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
    tensors = tower_tensors()
    swapped = {}
    for name, tensor in tensors.items():
        stem = name.split(".")[-2]
        swapped[name.replace(stem, other.get(stem, stem))] = tensor
    write_tower(model.with_name("mmproj.gguf"), swapped, feed_forward_length=0)
    found = dict(open_checkpoint(resolve(model), LoadConfig()).tensors())
    for number, name in ((1, "ffn_up"), (2, "ffn_down")):
        for kind in ("weight", "bias"):
            own = found[f"model.vision_model.encoder.layers.1.mlp.fc{number}.{kind}"]
            assert np.array_equal(own, tensors[f"v.blk.1.{name}.{kind}"])


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"architecture": "qwen2"}, r"not a vision tower .*got 'qwen2'\): pass the model's own"),
        ({"projector_type": "ldpv2"}, r"projector 'ldpv2' .* supported: gemma3, .*--mmproj none"),
        ({"projector_type": None}, "projector None"),
        ({"projector_type": "gemma3"}, r"tower of Gemma 3 does not fit .*'llama', not gemma3: "),
        ({"embedding_length": 64}, r"'v\.patch_embd\.weight' has the shape \[32, 3, 14, 14\]"),
        ({"patch_size": 7}, r"'v\.patch_embd\.weight' has the shape \[32, 3, 14, 14\]"),
        ({"block_count": 3}, r"says 3 layers \(clip\.vision\.block_count\), .* tensors of 2"),
        ({"head_count": 5}, "do not split into 5 heads"),
        ({"image_size": 112}, r"'v\.position_embd\.weight' has the shape .* image has 64 places"),
        ({"scale_factor": 4}, r"scale_factor is 4, but tensor 'mm\.model\.fc\.weight' has 128"),
        ({"block_count": None}, r"clip\.vision\.block_count must be a positive integer, got no"),
    ],
)
def test_a_tower_that_is_not_right_is_refused(
    model: Path, changes: dict[str, Any], problem: str
) -> None:
    write_tower(model.with_name("mmproj.gguf"), **changes)
    with pytest.raises(ModelError, match=problem):
        resolve(model)


def test_normalization_must_be_numbers(model: Path) -> None:
    from penstock.loading.gguf.mmproj import processor_files

    write_tower(model.with_name("mmproj.gguf"), image_mean=[0.5])
    source = resolve(model)
    assert source.mmproj is not None
    with pytest.raises(ModelError, match=r"clip\.vision\.image_mean must be 3 numbers, got \[0\.5"):
        processor_files(source.mmproj, source.config)


def test_a_tower_of_a_model_of_another_size_is_refused(model: Path) -> None:
    tensors = tower_tensors()
    tensors["mm.model.fc.weight"] = tensors["mm.model.fc.weight"][:64]
    write_tower(model.with_name("mmproj.gguf"), tensors)
    with pytest.raises(ModelError, match=r"have 64 dimensions, but those of .* have 256: pass the"):
        resolve(model)


def test_a_model_without_a_token_for_images_is_refused(model: Path) -> None:
    write_gguf(model)
    write_tower(model.with_name("mmproj.gguf"))
    with pytest.raises(ModelError, match=r"has no '<image>', .* --mmproj none to take text only"):
        resolve(model)


@pytest.mark.parametrize("name", ["v.blk.1.ln2.weight", "v.post_ln.weight"])
def test_missing_tensors_are_named(model: Path, name: str) -> None:
    tensors = tower_tensors()
    del tensors[name]
    write_tower(model.with_name("mmproj.gguf"), tensors)
    with pytest.raises(ModelError, match=f"mmproj.gguf: tensor '{name}' is missing: fetch"):
        open_checkpoint(resolve(model), LoadConfig())


def test_unknown_tensors_are_named(model: Path) -> None:
    tensors = {**tower_tensors(), "a.conv1d.weight": np.zeros(3, np.float32)}
    write_tower(model.with_name("mmproj.gguf"), tensors)
    with pytest.raises(ModelError, match=r"of Idefics 3, .* does not have: a\.conv1d\.weight"):
        open_checkpoint(resolve(model), LoadConfig())
