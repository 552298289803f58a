"""Adapters that are broken, hostile or made for another model: each is refused, with the reason."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import MakeAdapter, MakeCheckpoint, edit_config, make_adapter
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from penstock.config import LoadConfig, ModelConfig
from penstock.layers.build import Build
from penstock.loading.adapters.read import read_adapter, read_deltas
from penstock.loading.adapters.source import adapter_digest, locate_adapter
from penstock.loading.source import resolve_source
from penstock.models.registry import build_model
from penstock.ops.registry import Ops
from penstock.protocol.errors import AdapterError

Q = "base_model.model.model.layers.0.self_attn.q_proj"
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def llama(checkpoint_of: MakeCheckpoint) -> Any:
    """The model without weights, which reading does not need."""
    return model_of(checkpoint_of("llama"))


@pytest.fixture
def adapter(adapter_of: MakeAdapter, tmp_path: Path) -> Path:
    """An adapter of q_proj and v_proj that a test may break."""
    return shutil.copytree(adapter_of("q_and_v"), tmp_path / "adapter")


def model_of(checkpoint: Path) -> Any:
    source = resolve_source(ModelConfig(model=str(checkpoint)), LoadConfig())
    build = Build(torch.float32, torch.device("meta"), 512, Ops("cpu"))
    return build_model(source.config, build)


def read(path: Path, model: Any, max_rank: int = 16, dtype: torch.dtype = torch.float32) -> None:
    read_deltas(path, model, max_rank, dtype)


def change_tensors(adapter: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(adapter / WEIGHTS)
    change(tensors)
    save_file(tensors, adapter / WEIGHTS)


# -- the configuration


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, r"peft_type must be LORA, got 'IA3'.*merge_and_unload"),
        ({"peft_type": "PROMPT_TUNING"}, "peft_type must be LORA"),
        ({"peft_type": None}, "peft_type must be LORA, got None"),
        ({"use_qalora": True}, "use_qalora is set, which is not supported"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is set"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens is set"),
        ({"init_lora_weights": "pissa_niter_4"}, "changed the base's weights before training"),
        ({"r": "8"}, "r must be an integer from 1 to 1048576, got '8'"),
        ({"r": 0}, "r must be an integer from 1 to 1048576, got 0"),
        ({"r": 10**9}, "r must be an integer from 1 to 1048576, got 1000000000"),
        ({"use_dora": True}, r"use_dora is set, but .*q_proj lacks its lora_magnitude_vector"),
        ({"r": 4}, r"q_proj\.lora_A\.weight: has rank 8, but adapter_config.json says 4"),
        ({"rank_pattern": {"q_proj": 2}}, r"q_proj.*has rank 8, but adapter_config.json says 2"),
        ({"rank_pattern": [8]}, "rank_pattern must be an object"),
        ({"rank_pattern": {"q_proj": -1}}, r"rank_pattern\['q_proj'\] must be an integer"),
        ({"rank_pattern": {"(q": 8}}, r"rank_pattern has '\(q', which is no regular expression"),
        ({"alpha_pattern": {"(a*)*b": 8}}, "too complex to match safely"),
        ({"alpha_pattern": {"a?" * 30 + "a" * 30: 8}}, "too complex to match safely"),
        ({"alpha_pattern": {"(?:a|aa)+$": 8}}, "too complex to match safely"),
        ({"lora_alpha": "much"}, "lora_alpha must be a finite number, got 'much'"),
        ({"lora_alpha": math.inf}, "lora_alpha must be a finite number, got inf"),
        ({"trainable_token_indices": "all"}, "trainable_token_indices must list token ids"),
    ],
)
def test_settings_that_cannot_be_served_are_named(
    changes: dict[str, Any], message: str, adapter: Path, llama: Any
) -> None:
    edit_config(adapter, **changes)
    with pytest.raises(AdapterError, match=message):
        read(adapter, llama)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"LORA"', "\xff", "[" * 100_000])
def test_a_configuration_that_is_no_json_object_is_refused(
    text: str, adapter: Path, llama: Any
) -> None:
    (adapter / "adapter_config.json").write_bytes(text.encode("latin-1"))
    for reading in (lambda: read(adapter, llama), lambda: adapter_digest(adapter)):
        with pytest.raises(AdapterError, match=r"adapter_config\.json: (not valid|must be a)"):
            reading()


def test_patterns_as_peft_s_users_write_them_are_not_too_complex(adapter: Path, llama: Any) -> None:
    patterns = [r"model\.layers\.\d+\.self_attn\.(q|v)_proj", r".*\.layers\.(0|1)\..*_proj"]
    patterns += [r"^model.layers.[0-2].*", "q_proj", r"(?:model\.)?layers\.1\.[a-z_.]+"]
    edit_config(adapter, alpha_pattern=dict.fromkeys(patterns, 4))
    read(adapter, llama)


# -- files


def test_an_adapter_without_weights_is_refused_and_pickles_are_not_read(
    adapter: Path, llama: Any
) -> None:
    (adapter / WEIGHTS).unlink()
    with pytest.raises(AdapterError, match=r"no adapter_model\.safetensors; fetch it again"):
        read(adapter, llama)
    (adapter / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(AdapterError, match=r"only adapter_model\.bin\. Pickled files can run code"):
        read(adapter, llama)
    with pytest.raises(AdapterError, match=r"only adapter_model\.bin"):
        locate_adapter(str(adapter))


def test_a_folder_that_is_a_model_is_no_adapter(checkpoint_of: MakeCheckpoint, llama: Any) -> None:
    with pytest.raises(AdapterError, match=r"no adapter_config.json: it is a model, not an"):
        read(checkpoint_of("llama"), llama)


def test_a_name_that_is_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="no such file or folder, and it is not a hub id"):
        locate_adapter(str(tmp_path / "nowhere"))
    with pytest.raises(AdapterError, match="no such file or folder"):
        locate_adapter("x" * 5000)


def test_an_adapter_of_the_hub_is_fetched_without_other_weights(adapter: Path) -> None:
    asked: list[Any] = []

    def snapshot(repo: str, revision: str | None, patterns: Any, folder: str | None) -> str:
        asked.append((repo, revision, sorted(patterns), folder))
        return str(adapter)

    assert locate_adapter("org/name", "main", "cache", snapshot=snapshot) == adapter
    wanted = ["*.gguf", "adapter_config.json", "adapter_model.safetensors"]
    assert asked == [("org/name", "main", wanted, "cache")]


def test_links_out_of_the_folder_are_refused_but_for_the_hub_s_cache(
    adapter: Path, llama: Any, tmp_path: Path
) -> None:
    blob = tmp_path / "models--a--b" / "blobs" / "1234"
    blob.parent.mkdir(parents=True)
    shutil.move(adapter / WEIGHTS, blob)
    (adapter / WEIGHTS).symlink_to(blob)
    with pytest.raises(AdapterError, match=r"is a link to .*outside its folder: copy the file"):
        read(adapter, llama)
    with pytest.raises(AdapterError, match="outside its folder"):
        adapter_digest(adapter)
    snapshot = tmp_path / "models--a--b" / "snapshots" / "main"
    shutil.copytree(adapter, snapshot, symlinks=True)
    read(snapshot, llama)


@pytest.mark.skipif(os.name != "posix", reason="pipes in folders are POSIX's")
def test_a_pipe_in_place_of_a_file_does_not_block(adapter: Path, llama: Any) -> None:
    (adapter / WEIGHTS).unlink()
    os.mkfifo(adapter / WEIGHTS)
    with pytest.raises(AdapterError, match="is not a regular file"):
        read(adapter, llama)


def test_truncated_weights_are_refused(adapter: Path, llama: Any) -> None:
    whole = (adapter / WEIGHTS).read_bytes()
    for size in (0, 4, 8, 100, len(whole) // 2, len(whole) - 1):
        (adapter / WEIGHTS).write_bytes(whole[:size])
        for reading in (lambda: read(adapter, llama), lambda: adapter_digest(adapter)):
            with pytest.raises(AdapterError, match=r"safetensors: truncated or corrupt.*again"):
                reading()
    (adapter / WEIGHTS).write_bytes(whole + b"\0")
    with pytest.raises(AdapterError, match="truncated or corrupt"):
        read(adapter, llama)


@pytest.mark.parametrize(
    "header",
    [
        [],
        {"a": 1},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}},
        {"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2**60], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2**40] * 8, "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [2, 10]}},
        {"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}},
        {"a" * 100_000: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}},
        {
            "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            "b": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        },
    ],
)
def test_headers_that_lie_are_refused(header: Any, adapter: Path, llama: Any) -> None:
    text = json.dumps(header).encode()
    (adapter / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 8)
    with pytest.raises(AdapterError, match="truncated or corrupt"):
        read(adapter, llama)


@given(data=st.data())
def test_random_changes_of_the_files_never_raise_anything_else(
    data: st.DataObject, adapter: Path, llama: Any
) -> None:
    name = data.draw(st.sampled_from([WEIGHTS, "adapter_config.json"]))
    path = adapter / name
    whole = path.read_bytes()
    broken = bytearray(whole)
    limit = min(len(broken), 3000)  # most of the header, some of the numbers
    for position in data.draw(st.lists(st.integers(0, limit - 1), min_size=1, max_size=4)):
        broken[position] = data.draw(st.integers(0, 255))
    try:
        path.write_bytes(broken)
        read(adapter, llama)
    except AdapterError:
        pass
    finally:
        path.write_bytes(whole)


def test_integers_are_refused_by_name(adapter: Path, llama: Any) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{Q}.lora_A.weight"] = tensors[f"{Q}.lora_A.weight"].to(torch.int8)

    change_tensors(adapter, change)
    with pytest.raises(AdapterError, match=r"q_proj\.lora_A\.weight has the type 'I8', but adapt"):
        read(adapter, llama)


# -- numbers and shapes


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("kind", ["lora_A", "lora_B"])
def test_numbers_that_are_not_finite_are_refused(
    number: float, kind: str, adapter: Path, llama: Any
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{Q}.{kind}.weight"][1, 1] = number

    change_tensors(adapter, change)
    with pytest.raises(AdapterError, match=rf"q_proj\.{kind}\.weight: has numbers .* not finite$"):
        read(adapter, llama)


def test_numbers_that_the_type_cannot_hold_are_refused(adapter: Path, llama: Any) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{Q}.lora_B.weight"][0, 0] = 60_000.0  # doubled by the scaling

    change_tensors(adapter, change)
    read(adapter, llama)
    with pytest.raises(AdapterError, match=r"not finite as torch\.float16: choose another --lora"):
        read(adapter, llama, dtype=torch.float16)


def test_a_rank_above_the_limit_is_refused(adapter: Path, llama: Any) -> None:
    with pytest.raises(AdapterError, match="rank 8, the limit is 7: raise --max-lora-rank"):
        read(adapter, llama, max_rank=7)


def test_a_file_larger_than_any_adapter_is_not_read(adapter: Path, llama: Any) -> None:
    with (adapter / WEIGHTS).open("r+b") as file:
        file.truncate(2**40)  # sparse
    with pytest.raises(AdapterError, match="more than any adapter of rank 16 for this model"):
        read(adapter, llama)


@pytest.mark.parametrize(
    ("kind", "shape", "message"),
    [
        ("lora_A", (8, 63), "63 inputs and 64 outputs, the model's has 64 and 64"),
        ("lora_B", (65, 8), "64 inputs and 65 outputs, the model's has 64 and 64"),
        ("lora_B", (64, 7), "lora_A.weight has 8 rows"),
        ("lora_A", (512,), r"must have 2 dimensions, got shape \[512\]"),
        ("lora_A", (0, 64), r"must have 2 dimensions, got shape \[0, 64\]"),
    ],
)
def test_other_shapes_than_the_model_s_are_refused(
    kind: str, shape: tuple[int, ...], message: str, adapter: Path, llama: Any
) -> None:
    change_tensors(
        adapter, lambda tensors: tensors.update({f"{Q}.{kind}.weight": torch.ones(shape)})
    )
    with pytest.raises(AdapterError, match=message):
        read(adapter, llama)


def test_half_of_a_pair_is_refused(adapter: Path, llama: Any) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[f"{Q}.lora_B.weight"]

    change_tensors(adapter, change)
    with pytest.raises(AdapterError, match="lacks its other matrix: the file is incomplete"):
        read(adapter, llama)


# -- modules


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (
            "base_model.model.model.layers.0.self_attn.q_prj.lora_A.weight",
            r"model\.layers\.0\.self_attn\.q_prj, which the model does not have; the nearest are "
            r"model\.layers\.0\.self_attn\.q_proj",
        ),
        ("base_model.model.transformer.h.0.attn.c_attn.lora_A.weight", "the nearest are model"),
        ("base_model.model.model.layers.0.self_attn.q_proj.ia3_l", "is not known from LoRA"),
        ("base_model.model.model.norm.weight", r"model\.norm was trained as a whole \(modules_to"),
        ("base_model.model.score.weight", r"score was trained as a whole \(modules_to_save\)"),
        (f"{Q}.base_layer.bias", "has no bias that could be replaced"),
    ],
)
def test_modules_without_a_place_are_refused_with_the_nearest_names(
    tensor: str, message: str, adapter: Path, llama: Any
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        size = (8, 64) if "lora_A" in tensor else (64,)
        tensors[tensor] = torch.ones(size)
        if "lora_A" in tensor:
            tensors[tensor.replace("lora_A", "lora_B")] = torch.ones(64, 8)

    change_tensors(adapter, change)
    with pytest.raises(AdapterError, match=message):
        read(adapter, llama)


def test_an_adapter_of_a_larger_model_is_refused(
    checkpoint_of: MakeCheckpoint, tmp_path: Path, llama: Any
) -> None:
    from tiny_models import make_checkpoint

    larger = make_checkpoint(tmp_path / "larger", "llama", num_hidden_layers=4)
    adapter = make_adapter(tmp_path / "adapter", larger, target_modules=["q_proj"])
    with pytest.raises(AdapterError, match=r"layers\.3\.self_attn\.q_proj, which the model does"):
        read(adapter, llama)


def test_an_adapter_with_added_tokens_is_refused(adapter: Path, llama: Any) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["base_model.model.model.embed_tokens.weight"] = torch.ones(260, 64)

    change_tensors(adapter, change)
    with pytest.raises(
        AdapterError, match=r"\[260, 64\], the model's is \[256, 64\].*added tokens"
    ):
        read(adapter, llama)


def test_one_matrix_cannot_be_changed_twice(adapter: Path, llama: Any) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for kind in ("lora_A", "lora_B"):
            own = tensors[f"{Q}.{kind}.weight"].clone()
            tensors[f"model.language_model.layers.0.self_attn.q_proj.{kind}.weight"] = own

    change_tensors(adapter, change)
    with pytest.raises(AdapterError, match="changes the same weights as"):
        read(adapter, llama)


def test_names_without_peft_s_prefix_are_read_too(adapter: Path, llama: Any) -> None:
    expected = read_deltas(adapter, llama, 8, torch.float32)
    tensors = load_file(adapter / WEIGHTS)
    for prefix in ("", "base_model.model."):
        renamed = {
            prefix + name.removeprefix("base_model.model.").replace("lora_A", "lora_A.default"): own
            for name, own in tensors.items()
        }
        save_file(renamed, adapter / WEIGHTS)
        found = read_deltas(adapter, llama, 8, torch.float32)
        assert found.linear.keys() == expected.linear.keys()


# -- identity


def test_the_digest_is_of_the_content(adapter: Path, tmp_path: Path) -> None:
    digest = adapter_digest(adapter)
    assert adapter_digest(shutil.copytree(adapter, tmp_path / "copy")) == digest
    edit_config(adapter, lora_alpha=32)
    other = adapter_digest(adapter)
    assert other != digest
    change_tensors(adapter, lambda tensors: tensors[f"{Q}.lora_A.weight"].add_(1e-6))
    assert adapter_digest(adapter) not in (digest, other)


def test_other_content_than_was_registered_is_refused(adapter: Path, llama: Any) -> None:
    digest = adapter_digest(adapter)
    read_deltas(adapter, llama, 8, torch.float32, digest)
    change_tensors(adapter, lambda tensors: tensors[f"{Q}.lora_A.weight"].add_(1.0))
    with pytest.raises(AdapterError, match="other weights than when it was registered"):
        read_deltas(adapter, llama, 8, torch.float32, digest)


def test_several_threads_read_at_once(adapter: Path, llama: Any) -> None:
    found: list[Any] = []

    def run() -> None:
        found.append(read_adapter(adapter, llama, 8, torch.bfloat16))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for weights in found:
        for place, delta in weights.linear.items():
            assert delta.b.dtype == torch.bfloat16
            assert not delta.b.is_inference()  # may be used outside inference mode
            assert torch.equal(delta.b, found[0].linear[place].b)
