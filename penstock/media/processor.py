"""Loads a checkpoint's processor: transformers' class, with its image processor on Pillow.

The parts are loaded one by one, because transformers' part for videos needs torchvision. Own ones
stand in for it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.media.video_processor import VIDEO_PROCESSORS
from penstock.protocol.errors import ModelError

FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")


def load_processor(folder: str) -> Any:
    """The processor of the checkpoint in `folder`."""
    import transformers
    from transformers import AutoImageProcessor, AutoTokenizer

    from penstock.media.own_processors import OWN, OWN_IMAGE_PROCESSORS

    name = _class_name(folder)
    processor_class = OWN.get(name) or getattr(transformers, name, None)
    if processor_class is None:
        raise ModelError(f"{folder}: transformers has no class {name!r}")

    class Loose(processor_class):  # type: ignore[misc, valid-type]
        """Takes a processor without its part for video."""

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return type(argument)

    given: dict[str, Any] = {}
    for part in processor_class.get_attributes():
        if part == "tokenizer":
            load: Any = AutoTokenizer.from_pretrained
            given[part] = load(folder, local_files_only=True)
        elif part == "image_processor" and name in OWN_IMAGE_PROCESSORS:
            load = OWN_IMAGE_PROCESSORS[name].from_pretrained
            given[part] = load(folder, local_files_only=True)
        elif part == "image_processor":
            load = AutoImageProcessor.from_pretrained
            given[part] = load(folder, backend="pil", local_files_only=True)
        elif part == "video_processor" and (videos := VIDEO_PROCESSORS.get(_class_name(folder))):
            given[part] = videos(video_settings(Path(folder)))
        else:
            given[part] = None
    settings = {
        key: value
        for key, value in read_settings(Path(folder) / FILES[0]).items()
        if key not in ("processor_class", "auto_map", *processor_class.get_attributes())
    }
    return Loose(**given, **settings)


def video_settings(folder: Path) -> dict[str, Any]:
    """A checkpoint's settings of videos. Older ones have them among those of images."""
    own = read_settings(folder / FILES[0]).get("video_processor")
    if isinstance(own, dict):
        return own
    return read_settings(folder / "video_preprocessor_config.json") or read_settings(
        folder / FILES[1]
    )


def _class_name(folder: str) -> str:
    for name in FILES:
        found = read_settings(Path(folder) / name).get("processor_class")
        if isinstance(found, str):
            return found
    from transformers.models.auto import processing_auto

    model_type = read_settings(Path(folder) / "config.json").get("model_type")
    names: Any = getattr(processing_auto, "PROCESSOR_MAPPING_NAMES", {})
    found = names.get(str(model_type))
    if not isinstance(found, str):
        raise ModelError(
            f"{folder}: no processor is known for images: preprocessor_config.json must name its "
            "processor_class"
        )
    return found


def read_settings(path: Path) -> dict[str, Any]:
    """A file of JSON; {} if there is none."""
    if not path.exists():
        return {}
    found = json.loads(path.read_text())
    return found if isinstance(found, dict) else {}
