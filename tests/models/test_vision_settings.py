"""What config.json files of vision-language models leave out, or have twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_vision import make_vision_checkpoint

from penstock.config import LoadConfig, ModelConfig
from penstock.loading.source import resolve_source
from penstock.loading.text_config import LANGUAGE_DEFAULTS, TEXT_DEFAULTS, text_settings
from penstock.models.llava_next import best_size
from penstock.models.vision import VISION_DEFAULTS, num_feature_layers, vision_settings
from penstock.protocol.errors import ModelError


def flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of transformers under the names of checkpoints' files."""
    rope = settings.get("rope_parameters") or {}
    return {**settings, "rope_theta": rope.get("rope_theta")}


@pytest.mark.parametrize("kind", LANGUAGE_DEFAULTS)
def test_language_models_default_to_the_sizes_of_transformers(kind: str) -> None:
    from transformers import AutoConfig

    theirs = AutoConfig.for_model(kind).to_dict()
    own = LANGUAGE_DEFAULTS[kind]
    assert {name: theirs[name] for name in own} == own


@pytest.mark.parametrize("kind", VISION_DEFAULTS)
def test_towers_default_to_the_sizes_of_transformers(kind: str) -> None:
    from transformers import AutoConfig

    theirs = AutoConfig.for_model(kind).to_dict()
    own = vision_settings({"vision_config": {"model_type": kind}})
    assert vision_settings({"vision_config": {name: theirs[name] for name in own}}) == own


@pytest.mark.parametrize("kind", ["mistral3"])
def test_models_default_to_the_language_model_of_transformers(kind: str) -> None:
    from transformers import AutoConfig

    theirs = flat(AutoConfig.for_model(kind).text_config.to_dict())
    own = TEXT_DEFAULTS[kind]
    assert {name: theirs[name] for name in own} == own


def test_an_old_llava_file_has_the_sizes_of_llama() -> None:
    text = {"model_type": "llama", "vocab_size": 32064, "max_position_embeddings": 4096}
    settings = text_settings({"model_type": "llava", "text_config": text, "vision_config": {}})
    assert settings["vocab_size"] == 32064
    assert settings["num_hidden_layers"] == settings["num_attention_heads"] == 32


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("given", ["none", "both"])
def test_the_tensors_say_whether_the_head_is_tied(
    is_tied: bool, given: str, tmp_path: Path
) -> None:
    make_vision_checkpoint(tmp_path, "internvl" if is_tied else "internvl_normed")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for each, value in ((config, not is_tied), (config["text_config"], is_tied)):
        each.pop("tie_word_embeddings", None)
        if given == "both":
            each["tie_word_embeddings"] = value
    path.write_text(json.dumps(config))
    source = resolve_source(ModelConfig(str(tmp_path)), LoadConfig())
    assert source.config["tie_word_embeddings"] == is_tied


@pytest.mark.parametrize(("layer", "expected"), [(-1, 24), (-2, 23), (24, 24), (0, 0), ([-2], 23)])
def test_features_are_taken_after_the_named_layer(layer: object, expected: int) -> None:
    assert num_feature_layers({"vision_feature_layer": layer}, 24, -2) == expected


@pytest.mark.parametrize("layer", [25, -26, "last", True, [-1, -2]])
def test_a_layer_that_the_tower_lacks_is_refused(layer: object) -> None:
    with pytest.raises(ModelError, match="one of the tower's 24 layers"):
        num_feature_layers({"vision_feature_layer": layer}, 24, -2)


def test_tiles_are_chosen_as_by_transformers() -> None:
    from transformers.image_processing_utils import select_best_resolution

    sizes = [(384 * rows, 384 * columns) for rows in range(1, 7) for columns in range(1, 7)]
    for height in range(50, 3000, 417):
        for width in range(50, 3000, 391):
            theirs = select_best_resolution((height, width), sizes)
            assert best_size(height, width, sizes) == theirs
