"""Merging adapters into weights: `penstock merge` and `--merge-lora`, against peft's merging."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from adapters import (
    ATTENTION,
    FLAVOURS,
    SINGLE_EXPERTS,
    WRAPPED,
    MakeAdapter,
    MakeCheckpoint,
    MergedReference,
    make_adapter,
    reference_tokens,
)
from gguf_builder import write_gguf
from safetensors.torch import load_file, save_file
from tiny_engine import greedy_tokens, open_llm, random_prompts
from tiny_models import Reference

from penstock.cli.main import main
from penstock.config import LoadConfig, ModelConfig
from penstock.loading.checkpoint import open_checkpoint
from penstock.loading.source import resolve_source
from penstock.models.merging import write_merged
from penstock.protocol.errors import AdapterError, ConfigError

PROMPTS = random_prompts("lora", 5, 23)

# peft cannot merge an adapter of a tied embedding.
MERGEABLE = [name for name in (*FLAVOURS, *SINGLE_EXPERTS) if name != "tied_embedding"]
SHORT = ["dora", "tied_embedding", "saved_modules", "trained_tokens", "fused_dora"]
SHORT += ["stacked_transposed", "bias_all", "mixtral"]
LONG = [name for name in (*FLAVOURS, *SINGLE_EXPERTS) if name not in SHORT]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def write(checkpoint: Path, adapter: Path, out: Path) -> Path:
    write_merged(resolve_source(ModelConfig(model=str(checkpoint)), LoadConfig()), adapter, out)
    return out


@pytest.mark.parametrize("name", MERGEABLE)
def test_merged_checkpoints_have_the_weights_that_peft_merges(
    name: str, checkpoint_of: MakeCheckpoint, adapter_of: MakeAdapter, tmp_path: Path
) -> None:
    checkpoint = checkpoint_of(FLAVOURS[name].variant if name in FLAVOURS else name)
    adapter = adapter_of(name)
    MergedReference(checkpoint, adapter).model.save_pretrained(tmp_path / "theirs")
    ours = tensors_of(write(checkpoint, adapter, tmp_path / "ours"))
    theirs, base = tensors_of(tmp_path / "theirs"), tensors_of(checkpoint)
    assert ours.keys() == theirs.keys() == base.keys()
    assert any(not torch.equal(ours[tensor], base[tensor]) for tensor in ours)
    for tensor, weight in theirs.items():
        torch.testing.assert_close(ours[tensor], weight, rtol=1e-5, atol=1e-5, msg=tensor)


@pytest.mark.parametrize(
    "name", [*SHORT, *(pytest.param(name, marks=pytest.mark.slow) for name in LONG)]
)
def test_a_model_merged_while_it_loads_gives_the_tokens_of_peft(
    name: str, checkpoint_of: MakeCheckpoint, adapter_of: MakeAdapter, tmp_path: Path
) -> None:
    checkpoint = checkpoint_of(FLAVOURS[name].variant if name in FLAVOURS else name)
    adapter = adapter_of(name)
    expected = reference_tokens(MergedReference(checkpoint, adapter), PROMPTS)
    assert expected != reference_tokens(Reference(checkpoint), PROMPTS)
    with open_llm(checkpoint, merge_lora=str(adapter)) as llm:
        assert greedy_tokens(llm, PROMPTS) == expected
    with open_llm(write(checkpoint, adapter, tmp_path / "merged")) as llm:
        assert greedy_tokens(llm, PROMPTS) == expected


def test_an_adapter_of_a_text_model_and_its_vision_tower_merges(
    checkpoint_of: MakeCheckpoint, tmp_path: Path
) -> None:
    checkpoint = checkpoint_of(WRAPPED.variant)
    make_adapter(tmp_path / "adapter", checkpoint, target_modules=["q_proj", "v_proj", "down_proj"])
    MergedReference(checkpoint, tmp_path / "adapter").model.save_pretrained(tmp_path / "theirs")
    ours = tensors_of(write(checkpoint, tmp_path / "adapter", tmp_path / "ours"))
    theirs = tensors_of(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    for tensor, weight in theirs.items():
        torch.testing.assert_close(ours[tensor], weight, rtol=1e-5, atol=1e-5, msg=tensor)


@pytest.mark.parametrize("targets", [["embed_tokens"], ["lm_head"]])
def test_a_tied_model_is_untied_if_the_adapter_changes_one_use_of_its_matrix(
    targets: list[str], checkpoint_of: MakeCheckpoint, tmp_path: Path
) -> None:
    """peft merges into both uses of the matrix. Its unmerged model is what was trained."""
    import peft

    checkpoint = checkpoint_of("qwen3_tied")
    adapter = make_adapter(tmp_path / "adapter", checkpoint, target_modules=targets)
    reference = Reference(checkpoint)
    base = reference_tokens(reference, PROMPTS)
    reference.model = peft.PeftModel.from_pretrained(reference.model, adapter).eval()
    expected = reference_tokens(reference, PROMPTS)
    assert expected != base
    with open_llm(checkpoint, merge_lora=str(adapter)) as llm:
        assert greedy_tokens(llm, PROMPTS) == expected
    merged = write(checkpoint, adapter, tmp_path / "merged")
    assert json.loads((merged / "config.json").read_text())["tie_word_embeddings"] is False
    assert reference_tokens(Reference(merged), PROMPTS) == expected
    with open_llm(merged) as llm:
        assert greedy_tokens(llm, PROMPTS) == expected


def test_merging_comes_before_quantization_and_before_ranks_split_weights(
    checkpoint_of: MakeCheckpoint, adapter_of: MakeAdapter, tmp_path: Path
) -> None:
    checkpoint, adapter = checkpoint_of("llama"), adapter_of("dora")
    merged = write(checkpoint, adapter, tmp_path / "merged")
    with open_llm(merged, quantization="int8") as llm:
        expected = greedy_tokens(llm, PROMPTS)
    own = {"merge_lora": str(adapter), "quantization": "int8"}
    with open_llm(checkpoint, **own, tensor_parallel_size=2) as llm:
        assert greedy_tokens(llm, PROMPTS) == expected


@pytest.mark.parametrize("type_name", ["F32", "Q8_0"])
def test_an_adapter_merges_into_the_matrices_of_a_gguf_file(
    type_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are dequantized. The reference is a folder with the same floats."""
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", type_name, tied=False, scale=0.01)
    source = resolve_source(ModelConfig(model=str(path)), LoadConfig())
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(source.config))
    floats = dict(open_checkpoint(source, LoadConfig()).tensors())
    save_file(
        {name: tensor.contiguous() for name, tensor in floats.items()},  # type: ignore[union-attr]
        folder / "model.safetensors",
    )
    settings = {"target_modules": [*ATTENTION, "gate_proj", "embed_tokens", "lm_head"]}
    adapter = make_adapter(tmp_path / "adapter", folder, **settings)
    prompts = [{"prompt_token_ids": [5, 7, 11, 2, 30]}]
    options = {"max_model_len": 64, "gguf_compute": "dequantize"}
    with open_llm(write(folder, adapter, tmp_path / "merged"), **options) as llm:
        expected = greedy_tokens(llm, prompts)
    with open_llm(path, **options) as llm:
        assert greedy_tokens(llm, prompts) != expected
    with open_llm(path, merge_lora=str(adapter), **options) as llm:
        assert greedy_tokens(llm, prompts) == expected
    with open_llm(path, merge_lora=str(adapter), max_model_len=64) as llm:  # others stay in blocks
        assert len(greedy_tokens(llm, prompts)[0]) == 16
    assert main(["merge", str(path), str(adapter), str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert "is a GGUF file: merge into the 16- or 32-bit checkpoint" in message
    assert "--merge-lora" in message


def test_merged_weights_have_a_fingerprint_of_their_own(
    checkpoint_of: MakeCheckpoint, adapter_of: MakeAdapter
) -> None:
    model = ModelConfig(model=str(checkpoint_of("llama")))
    adapters = [None, *(str(adapter_of(name)) for name in ("dora", "q_and_v"))]
    prints = {resolve_source(model, LoadConfig(merge_lora=each)).fingerprint for each in adapters}
    assert len(prints) == 3


def test_the_command_writes_a_folder_with_the_model_s_other_files(
    checkpoint_of: MakeCheckpoint,
    adapter_of: MakeAdapter,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    checkpoint = shutil.copytree(checkpoint_of("llama"), tmp_path / "base")
    (checkpoint / "tokenizer.json").write_text("{}")
    out = tmp_path / "merged"
    assert main(["merge", str(checkpoint), str(adapter_of("q_and_v")), str(out)]) == 0
    assert "6 tensors merged" in capsys.readouterr().out
    names = {path.name for path in out.iterdir()}
    assert names == {path.name for path in checkpoint.iterdir()}
    assert main(["merge", str(checkpoint), str(adapter_of("q_and_v")), str(out)]) == 2
    assert "exists already" in capsys.readouterr().err


def test_a_router_with_a_correction_beside_its_weight_merges(
    checkpoint_of: MakeCheckpoint, tmp_path: Path
) -> None:
    checkpoint = checkpoint_of("minimax_m2")
    adapter = make_adapter(tmp_path / "adapter", checkpoint, target_modules="all-linear")
    expected = reference_tokens(MergedReference(checkpoint, adapter), PROMPTS)
    with open_llm(checkpoint, merge_lora=str(adapter)) as llm:
        assert greedy_tokens(llm, PROMPTS) == expected


def test_an_adapter_that_does_not_fit_leaves_no_folder(
    checkpoint_of: MakeCheckpoint, adapter_of: MakeAdapter, tmp_path: Path
) -> None:
    with pytest.raises(AdapterError, match=r"mlp\.down_proj, which .* the nearest"):
        write(checkpoint_of("mixtral"), adapter_of("fused_layers"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_bias_without_a_place_cannot_be_merged(
    checkpoint_of: MakeCheckpoint, tmp_path: Path
) -> None:
    checkpoint = checkpoint_of("llama")
    settings = {"target_modules": ["q_proj"], "lora_bias": True}
    adapter = make_adapter(tmp_path / "adapter", checkpoint, **settings)
    with pytest.raises(AdapterError, match=r"adds a bias.*--enable-lora"):
        write(checkpoint, adapter, tmp_path / "out")


def test_quantized_checkpoints_and_dummy_weights_are_refused(
    checkpoint_of: MakeCheckpoint,
    adapter_of: MakeAdapter,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    quantized = tmp_path / "int8"
    arguments = ["--method", "int8", "--no-perplexity"]
    assert main(["quantize", str(checkpoint_of("llama")), str(quantized), *arguments]) == 0
    adapter = str(adapter_of("q_and_v"))
    assert main(["merge", str(quantized), adapter, str(tmp_path / "out")]) == 2
    assert (
        "is quantized already (compressed-tensors): merge into the 16-" in capsys.readouterr().err
    )
    with pytest.raises(AdapterError, match="is stored quantized"):
        open_llm(quantized, merge_lora=adapter)
    with pytest.raises(ConfigError, match="merge_lora needs a model's weights"):
        LoadConfig(merge_lora=adapter, load_format="dummy")
