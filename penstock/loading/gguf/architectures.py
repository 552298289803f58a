"""The table of supported GGUF architectures, by `general.architecture`."""

from __future__ import annotations

from penstock.loading.gguf.architecture import GGUFArchitecture
from penstock.loading.gguf.dense import DENSE
from penstock.loading.gguf.experts import DEEPSEEK_V2, MIXTRAL, SPARSE, is_corrected
from penstock.loading.gguf.file import GGUFFile
from penstock.loading.gguf.metadata import Metadata, fail
from penstock.loading.gguf.others import OLMO3, OTHERS
from penstock.loading.gguf.recurrent import RECURRENT

ARCHITECTURES: dict[str, GGUFArchitecture] = {**DENSE, **SPARSE, **RECURRENT, **OTHERS}


def architecture_of(file: GGUFFile) -> GGUFArchitecture:
    """The architecture of a file. Raises ModelError if it is not in ARCHITECTURES."""
    name = file.metadata.get("general.architecture")
    if name == "clip":
        fail(file, "a vision tower without its language model: pass the language model's file")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        fail(
            file,
            f"the GGUF architecture {name!r} is not supported; supported: "
            f"{', '.join(ARCHITECTURES)}",
        )
    if name == "llama" and file.metadata.get("llama.expert_count"):
        return MIXTRAL
    if name == "deepseek2" and not is_corrected(Metadata(file)):
        return DEEPSEEK_V2
    if name == "olmo2" and file.metadata.get("olmo2.attention.sliding_window"):
        return OLMO3
    return ARCHITECTURES[name]
