from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_builder import HEADS, K_TYPES, KV_HEADS, QUANTIZABLE, permute_rope, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from penstock.config import LoadConfig, ModelConfig
from penstock.loading.checkpoint import Checkpoint, open_checkpoint
from penstock.loading.gguf.checkpoint import unpermute_rope
from penstock.loading.gguf.config import map_tensors
from penstock.loading.gguf.file import read_gguf
from penstock.loading.source import resolve_source
from penstock.protocol.errors import ModelError


def checkpoint_of(path: Path, load_format: str = "auto") -> Checkpoint:
    load = LoadConfig(load_format=load_format)  # type: ignore[arg-type]
    return open_checkpoint(resolve_source(ModelConfig(model=str(path)), load), load)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


def write_index(folder: Path, weight_map: dict[str, str], kind: str = "model.safetensors") -> None:
    (folder / f"{kind}.index.json").write_text(json.dumps({"weight_map": weight_map}))


def random_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "model.embed.weight": torch.randn(10, 4, generator=generator),
        "b.weight": torch.randn(4, 4, generator=generator).bfloat16(),
        "a.weight": torch.randn(4, generator=generator).half(),
        "scalar": torch.tensor(3.0),
    }


def assert_holds(checkpoint: Checkpoint, expected: dict[str, torch.Tensor]) -> None:
    found = dict(checkpoint.tensors())
    assert list(found) == checkpoint.names()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_a_single_file_gives_every_tensor_as_it_was(folder: Path) -> None:
    tensors = random_tensors()
    save_file(tensors, folder / "model.safetensors")
    assert_holds(checkpoint_of(folder), tensors)


def test_shards_give_every_tensor_and_foreign_files_are_ignored(folder: Path) -> None:
    tensors = random_tensors()
    shards = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for shard in set(shards.values()):
        part = {name: tensor for name, tensor in tensors.items() if shards[name] == shard}
        save_file(part, folder / shard)
    write_index(folder, shards)
    save_file({"other": torch.ones(1)}, folder / "consolidated.safetensors")
    assert_holds(checkpoint_of(folder), tensors)


def test_tensors_come_in_the_order_in_which_they_lie(folder: Path) -> None:
    tensors = {f"t{i}": torch.ones(3) * i for i in (9, 10, 2, 1)}
    save_file(tensors, folder / "model.safetensors")
    content = (folder / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    by_offset = sorted(header, key=lambda name: header[name]["data_offsets"])
    assert checkpoint_of(folder).names() == by_offset


def test_files_without_an_index_are_all_read(folder: Path) -> None:
    save_file({"a": torch.ones(2)}, folder / "one.safetensors")
    save_file({"b": torch.ones(3)}, folder / "two.safetensors")
    assert checkpoint_of(folder).names() == ["a", "b"]


def test_a_tensor_in_two_files_is_refused_with_both(folder: Path) -> None:
    save_file({"a": torch.ones(2)}, folder / "one.safetensors")
    save_file({"a": torch.ones(2)}, folder / "two.safetensors")
    with pytest.raises(ModelError, match=r"'a' is in .*one\.safetensors and again in .*two\.saf"):
        checkpoint_of(folder)


@pytest.mark.parametrize(
    ("weight_map", "complaint"),
    [
        ({"a": "one.safetensors", "z": "one.safetensors"}, "'z' is in .* but it is nowhere"),
        ({"a": "two.safetensors", "b": "one.safetensors"}, r"but it is in one\.safetensors"),
    ],
    ids=["nowhere", "elsewhere"],
)
def test_an_index_that_promises_what_is_not_there_is_refused(
    folder: Path, weight_map: dict[str, str], complaint: str
) -> None:
    save_file({"a": torch.ones(2)}, folder / "one.safetensors")
    save_file({"b": torch.ones(2)}, folder / "two.safetensors")
    write_index(folder, weight_map)
    with pytest.raises(ModelError, match=complaint):
        checkpoint_of(folder)


def test_a_shard_that_went_missing_is_refused_by_name(folder: Path) -> None:
    save_file({"a": torch.ones(2)}, folder / "model.safetensors")
    load = LoadConfig()
    source = resolve_source(ModelConfig(model=str(folder)), load)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors: cannot be read"):
        open_checkpoint(source, load)


@settings(max_examples=150)
@given(data=st.data())
def test_a_corrupt_safetensors_file_loads_or_is_a_model_error(
    folder: Path, data: st.DataObject
) -> None:
    path = folder / "model.safetensors"
    save_file(random_tensors(), path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        patch = data.draw(st.binary(min_size=1, max_size=8))
        content[at : at + len(patch)] = patch
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    with suppress(ModelError):
        list(checkpoint_of(folder).tensors())


@pytest.mark.parametrize("size", [0, 5, 8, 100, -1])
def test_a_truncated_safetensors_file_is_refused_by_name(folder: Path, size: int) -> None:
    path = folder / "model.safetensors"
    save_file(random_tensors(), path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ModelError, match=r"model\.safetensors: cannot be read"):
        checkpoint_of(folder)


def test_pickled_tensors_are_read_when_asked_for(folder: Path) -> None:
    tensors = random_tensors()
    torch.save(tensors, folder / "pytorch_model.bin")
    assert_holds(checkpoint_of(folder, "pt"), tensors)


def test_pickled_shards_are_read_when_asked_for(folder: Path) -> None:
    torch.save({"a": torch.ones(2)}, folder / "one.bin")
    torch.save({"b": torch.ones(3)}, folder / "two.bin")
    write_index(folder, {"a": "one.bin", "b": "two.bin"}, "pytorch_model.bin")
    expected = {"a": torch.ones(2), "b": torch.ones(3)}
    assert_holds(checkpoint_of(folder, "pt"), expected)


class Malicious:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("executed",)


def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"a": Malicious()}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin"):
        checkpoint_of(folder, "pt")
    assert "executed" not in capsys.readouterr().out


@pytest.mark.parametrize("content", [[torch.ones(1)], {"a": "text"}, {1: torch.ones(1)}], ids=str)
def test_a_pickle_that_is_not_a_dict_of_tensors_is_refused(folder: Path, content: object) -> None:
    torch.save(content, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin: (must contain|entry)"):
        checkpoint_of(folder, "pt")


@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04garbage"])
def test_a_corrupt_pickle_is_refused(folder: Path, content: bytes) -> None:
    (folder / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(ModelError, match=r"pytorch_model\.bin: cannot be read"):
        checkpoint_of(folder, "pt")


@pytest.mark.parametrize("type_name", [*QUANTIZABLE, *K_TYPES])
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_gguf_tensors_are_the_references_with_the_permutation_undone(
    tmp_path: Path, arch: str, type_name: str
) -> None:
    path = tmp_path / "model.gguf"
    written = write_gguf(path, arch, type_name)
    checkpoint = checkpoint_of(path)
    gguf_names = _gguf_names(path)
    assert checkpoint.names() == list(gguf_names)
    for name, tensor in checkpoint.tensors():
        found = tensor.numpy()
        if arch == "llama" and ".q_proj." in name:
            found = permute_rope(found, HEADS)
        if arch == "llama" and ".k_proj." in name:
            found = permute_rope(found, KV_HEADS)
        assert tensor.dtype == torch.float32
        assert np.array_equal(found, written[gguf_names[name]])


def _gguf_names(path: Path) -> dict[str, str]:
    source = resolve_source(ModelConfig(model=str(path)), LoadConfig())
    mapped = map_tensors(read_gguf(path), source.config)
    return {item.name: item.tensor.name for item in mapped}


def test_biases_of_llama_are_unpermuted_too(tmp_path: Path) -> None:
    bias = np.arange(256, dtype=np.float32)
    path = tmp_path / "model.gguf"
    write_gguf(path, extra={"blk.0.attn_q.bias": permute_rope(bias, HEADS)})
    tensors = dict(checkpoint_of(path).tensors())
    assert np.array_equal(tensors["model.layers.0.self_attn.q_proj.bias"].numpy(), bias)


def test_unpermuting_turns_pairs_into_halves() -> None:
    rows = torch.tensor([[0], [10], [1], [11], [2], [12], [3], [13]])  # 2 heads of dimension 4
    expected = [[0], [1], [10], [11], [2], [3], [12], [13]]
    assert unpermute_rope(rows, 2).tolist() == expected


def test_a_gguf_tensor_of_an_unsupported_type_is_refused_with_file_and_tensor(
    tmp_path: Path,
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, extra={"blk.0.attn_v.bias": np.zeros(128, np.int32)})
    with pytest.raises(ModelError, match=r"model\.gguf: tensor 'blk\.0\.attn_v\.bias' .* I32"):
        checkpoint_of(path)


def test_the_default_model_streams_all_its_tensors(default_gguf: Path) -> None:
    checkpoint = checkpoint_of(default_gguf)
    total = 0
    for name, tensor in checkpoint.tensors():
        assert torch.isfinite(tensor).all(), name
        total += tensor.numel()
    assert total == 134_515_008
