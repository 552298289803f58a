"""`penstock quantize`: what it writes is what Penstock, transformers and the format's own package
read, and what goes wrong leaves nothing behind."""

from __future__ import annotations

import json
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import Reference, make_checkpoint
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from penstock import LLM, SamplingParams
from penstock.cli.main import main
from penstock.config import LoadConfig, ModelConfig
from penstock.loading.source import ModelSource, resolve_source
from penstock.loading.write import check_target, check_unquantized
from penstock.protocol.errors import ConfigError, ModelError
from penstock.quantize import methods, perplexity, write
from penstock.quantize.methods import METHODS, method_named
from penstock.quantize.write import write_quantized

TOKENS = [*range(60, 90), 7, 200, 31]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return make_checkpoint(
        folder, "llama", hidden_size=32, intermediate_size=64, head_dim=16,
        num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1,
    )  # fmt: skip


def source_of(folder: Path) -> ModelSource:
    return resolve_source(ModelConfig(model=str(folder)), LoadConfig())


def logprobs_here(folder: Path, **options: Any) -> torch.Tensor:
    """[tokens - 1] log-probabilities of each token after those before it."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with LLM(
        str(folder), max_model_len=64, cpu_threads=1, kv_cache_memory_bytes=1 << 20, **options
    ) as llm:
        (output,) = llm.generate([{"prompt_token_ids": TOKENS}], params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    rows = zip(output.prompt_logprobs[1:], TOKENS[1:], strict=True)
    return torch.tensor([row[token].logprob for row, token in rows if row is not None])


def logprobs_in_transformers(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([TOKENS])).logits[0, :-1]
    return logits.float().log_softmax(-1)[torch.arange(len(TOKENS) - 1), torch.tensor(TOKENS[1:])]


@pytest.mark.parametrize("name", METHODS)
def test_transformers_reads_the_same_from_what_is_written(
    model: Path, tmp_path: Path, name: str
) -> None:
    out = tmp_path / "out"
    report = write_quantized(source_of(model), out, method_named(name, 32))
    assert len(report.quantized) == 7
    floats, written = logprobs_here(model), logprobs_here(out, cpu_backend="torch")
    theirs = logprobs_in_transformers(out)
    # Where activations are rounded, some have another neighbour; of int8, the package uses half a
    # number more than kernels do.
    assert torch.allclose(written, theirs, atol={"w4a16": 1e-4, "fp8": 2e-2, "int8": 0.25}[name])
    assert 1e-5 < (written - floats).abs().max() < 3  # it is quantized, and still the model


def test_experts_in_one_tensor_stay_floats_for_every_reader(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "gpt_oss")
    out = tmp_path / "out"
    report = write_quantized(source_of(model), out, method_named("w4a16", 32))
    assert any("experts" in layer for layer in report.kept)
    logits = Reference(out).logits(TOKENS)[:-1].float().log_softmax(-1)
    theirs = logits[torch.arange(len(TOKENS) - 1), torch.tensor(TOKENS[1:])]
    ours = logprobs_here(out, cpu_backend="torch", skip_tokenizer_init=True)
    assert torch.allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize("variant", ["llama", "gemma3_images"])
def test_a_head_that_is_the_embedding_stays_one_for_every_reader(
    variant: str, tmp_path: Path
) -> None:
    """It is not in the file, but transformers has a linear layer for it."""
    model = make_checkpoint(tmp_path / "model", variant, tie_word_embeddings=True)
    out = tmp_path / "out"
    write_quantized(source_of(model), out, method_named("w4a16", 32), [r".*\.1\.mlp"])
    logits = Reference(out).logits(TOKENS)[:-1].float().log_softmax(-1)
    theirs = logits[torch.arange(len(TOKENS) - 1), torch.tensor(TOKENS[1:])]
    assert torch.allclose(
        logprobs_here(out, cpu_backend="torch", skip_tokenizer_init=True), theirs, atol=1e-4
    )


def test_the_packages_own_code_unpacks_the_four_bits(model: Path, tmp_path: Path) -> None:
    from compressed_tensors.compressors import unpack_from_int32

    write_quantized(source_of(model), tmp_path / "out", method_named("w4a16", 32))
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    floats = load_file(model / "model.safetensors")
    name = "model.layers.0.mlp.down_proj"
    shape = torch.Size(tensors[f"{name}.weight_shape"].tolist())
    numbers = unpack_from_int32(tensors[f"{name}.weight_packed"], 4, shape).float()
    scales = tensors[f"{name}.weight_scale"].repeat_interleave(32, dim=1)
    weight = floats[f"{name}.weight"]
    assert (numbers * scales - weight).abs().max() <= scales.max() / 2 + 1e-6
    assert numbers.min() >= -7  # rounding to nearest clips nothing
    assert numbers.max() == 7


@pytest.mark.parametrize("name", METHODS)
def test_calibration_lessens_the_error_that_its_inputs_see(name: str) -> None:
    torch.manual_seed(3)
    weight = torch.randn(48, 64) * torch.rand(48, 1)
    weight[:, 5] *= 8.0  # a column that sets the scale, and that inputs hardly use
    inputs = torch.randn(200, 64)
    inputs[:, 5] *= 0.01
    method = method_named(name, 32)

    def error(moments: torch.Tensor | None) -> float:
        tensors = method.compress(weight, moments)
        scales = tensors["weight_scale"].repeat_interleave(method.group_size or 64, dim=1)
        grouped = weight / scales
        back = method.round(grouped) * scales
        return float(((back - weight) @ inputs.T).square().mean())

    assert error(inputs.square().sum(0)) < 0.9 * error(None)


def test_rows_of_zeros_stay_zero() -> None:
    weight = torch.zeros(4, 64)
    for name in METHODS:
        tensors = method_named(name, 32).compress(weight)
        assert torch.isfinite(tensors["weight_scale"].float()).all()
        numbers = tensors.get("weight", torch.zeros(1)).float()
        assert not numbers.any()


@pytest.mark.parametrize("name", METHODS)
def test_a_large_matrix_is_never_whole_as_floats(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted by torch's own allocator: what was allocated and not freed, at its highest."""
    weight = torch.randn(2048, 1024).bfloat16()
    method = method_named(name, 32)
    at_once = method.compress(weight)
    tile = 63 * 1024
    monkeypatch.setattr(methods, "TILE_NUMBERS", tile)
    with torch.profiler.profile(profile_memory=True) as profile:
        by_tile = method.compress(weight)
    assert by_tile.keys() == at_once.keys()
    assert all(torch.equal(by_tile[key].float(), at_once[key].float()) for key in at_once)
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    result = sum(tensor.nbytes for tensor in by_tile.values())
    assert result <= peak < result + 6 * 4 * tile < 4 * weight.numel()


def test_large_models_come_in_several_files(model: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    method = method_named("int8", 128)
    write_quantized(source_of(model), whole, method)
    write_quantized(source_of(model), parts, method, shard_bytes=8000)
    assert len(list(parts.glob("model-*.safetensors"))) > 2
    assert torch.equal(logprobs_here(whole), logprobs_here(parts))
    assert (parts / "tokenizer.json").exists()


def test_a_layer_whose_columns_do_not_divide_is_kept_and_named(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = write_quantized(source_of(model), out, method_named("w4a16", 64))
    assert report.quantized == ["model.layers.0.mlp.down_proj"]
    assert "no multiple of the group size 64" in report.kept["model.layers.0.mlp.up_proj"]
    config = json.loads((out / "config.json").read_text())
    assert "model.layers.0.mlp.up_proj" in config["quantization_config"]["ignore"]
    theirs = logprobs_in_transformers(out)
    assert torch.allclose(logprobs_here(out, cpu_backend="torch"), theirs, atol=1e-4)


class Interrupted:
    """A checkpoint in whose midst something happens."""

    def __init__(self, real: Any, event: Callable[[], None]) -> None:
        self.real = real
        self.event = event

    def names(self) -> list[str]:
        return list(self.real.names())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, item in enumerate(self.real.tensors()):
            if index == 5:
                self.event()
            yield item


def test_an_interrupted_run_leaves_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    opened = write.open_checkpoint
    monkeypatch.setattr(
        write, "open_checkpoint", lambda *args: Interrupted(opened(*args), interrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        write_quantized(source_of(model), tmp_path / "out", method_named("fp8", 128), shard_bytes=1)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_run_that_is_told_to_end_leaves_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unheard(*args: object) -> None:
        raise AssertionError("SIGTERM came to what stood there before the command")

    opened = write.open_checkpoint
    monkeypatch.setattr(
        write,
        "open_checkpoint",
        lambda *args: Interrupted(opened(*args), lambda: signal.raise_signal(signal.SIGTERM)),
    )
    previous = signal.signal(signal.SIGTERM, unheard)
    arguments = ["--method", "fp8", "--no-perplexity"]
    try:
        with pytest.raises(SystemExit) as ended:
            main(["quantize", str(model), str(tmp_path / "out"), *arguments])
        assert signal.getsignal(signal.SIGTERM) is unheard
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert ended.value.code == 128 + signal.SIGTERM
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_command_writes_reports_and_calibrates(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = partial(LLM, kv_cache_memory_bytes=2**24)  # not a million tiny blocks
    monkeypatch.setattr(perplexity, "LLM", small)
    text = tmp_path / "text.txt"
    text.write_text("Some words to look at, again and again. " * 4)
    arguments = ["quantize", str(model), str(tmp_path / "out"), "--method", "w4a16"]
    arguments += ["--group-size", "32", "--text", str(text), "--calibration-text", str(text)]
    arguments += ["--keep", r".*\.down_proj"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "6 layers quantized" in printed
    assert "model.layers.0.mlp.down_proj stays as it is: it matches" in printed
    assert "perplexity" in printed
    assert "159 tokens" in printed


def test_numbers_whose_scales_are_not_known_are_not_quantized_again(
    model: Path, tmp_path: Path
) -> None:
    path = model / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.down_proj.weight"
    save_file({**tensors, name: tensors[name].to(torch.float8_e4m3fn)}, path, {"format": "pt"})
    with pytest.raises(ModelError, match=r"mlp\.down_proj is stored as float8_e4m3fn"):
        write_quantized(source_of(model), tmp_path / "out", method_named("int8", 128))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["compression_config", "text_config"])
def test_a_checkpoint_that_says_elsewhere_that_it_is_quantized_is_refused(
    place: str, model: Path
) -> None:
    source = source_of(model)
    how = {"quant_method": "fp8"}
    config = {place: {"quantization_config": how} if place == "text_config" else how}
    with pytest.raises(ConfigError, match=r"is quantized already \(fp8\)"):
        check_unquantized(replace(source, config={**source.config, **config}), "")


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        ("", ["--method", "int4"], "invalid choice"),
        ("", ["--method", "w4a16", "--group-size", "48"], "must be 32, 64 or 128, got '48'"),
        ("", ["--method", "fp8", "--keep", "("], "is not a regular expression"),
        ("", ["--method", "fp8", "--text", "nowhere.txt"], "cannot read the text nowhere.txt"),
        ("quantized", ["--method", "fp8"], "is quantized already (gptq)"),
        ("occupied", ["--method", "fp8"], "exists already"),
        ("inside", ["--method", "fp8"], "lies inside the model"),
        ("integers", ["--method", "fp8"], "has no layer that could be quantized"),
        ("fused", ["--method", "int8", "--no-perplexity", "--keep", ".*k_proj"], "as one matrix"),
        ("empty", ["--method", "fp8", "--no-perplexity"], "text.txt is empty"),
    ],
)
def test_what_cannot_be_done_is_refused_and_leaves_nothing(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: str,
    arguments: list[str],
    message: str,
) -> None:
    out = tmp_path / "out"
    if change == "quantized":
        config = json.loads((model / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "gptq"}
        (model / "config.json").write_text(json.dumps(config))
    elif change == "occupied":
        shutil.copytree(model, out)
    elif change == "inside":
        out = model / "out"
    elif change == "integers":
        tensors = load_file(model / "model.safetensors")
        save_file({name: x.to(torch.int32) for name, x in tensors.items()}, model / "x.safetensors")
        (model / "model.safetensors").unlink()
        arguments = [*arguments, "--no-perplexity"]
    elif change == "empty":
        text = tmp_path / "text.txt"
        text.touch()
        arguments = [*arguments, "--calibration-text", str(text)]
    before = sorted(tmp_path.rglob("*"))
    try:
        code = main(["quantize", str(model), str(out), *arguments])
    except SystemExit as error:
        code = int(error.code or 0)
    assert code == 2
    assert message in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_link_to_an_empty_folder_is_that_folder(model: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    write_quantized(source_of(model), tmp_path / "link", method_named("int8", 128))
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there" / "model.safetensors").exists()


def test_others_may_read_the_weights_who_may_read_the_configuration(
    model: Path, tmp_path: Path
) -> None:
    write_quantized(source_of(model), tmp_path / "out", method_named("int8", 128))
    modes = {path.stat().st_mode for path in (tmp_path / "out").iterdir() if path.is_file()}
    assert len(modes) == 1


def test_a_place_that_cannot_be_made_is_said_before_anything_is_computed(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file is no folder"):
        check_target(tmp_path / "file" / "out", source_of(model))


def test_a_full_disk_is_said_and_leaves_nothing(model: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk."""
    before = sorted(tmp_path.iterdir())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    source = source_of(model)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        with pytest.raises(ConfigError, match=r"cannot write .*out: .*File too large"):
            write_quantized(source, tmp_path / "out", method_named("int8", 128))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(tmp_path.iterdir()) == before


def test_a_gguf_file_is_refused(default_model: str, tmp_path: Path) -> None:
    assert main(["quantize", default_model, str(tmp_path / "out"), "--method", "fp8"]) == 2
