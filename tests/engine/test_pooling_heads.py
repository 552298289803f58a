"""What follows pooling: classifiers, rerankers and rewards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny_engine import open_llm, random_prompts
from tiny_models import save_random, transformers_config
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification

from penstock import LLM, PoolingParams
from penstock.protocol.errors import ConfigError, InputError, ModelError
from penstock.text.scoring import QWEN3_RERANKER

LENGTHS = (1, 3, 16, 40)
PROMPTS = random_prompts(0, *LENGTHS)
WORDS = [
    "no", "yes", "the", "cat", "sat", "on", "a", "mat", "and", "then", "it", "left", "query",
    "document",
]  # fmt: skip
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


def write_tokenizer(folder: Path, is_bert: bool) -> Tokenizer:
    """One token a word; BERT's with its frame of special tokens."""
    vocab = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if is_bert:
        tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def open_text(folder: Path, **options: Any) -> LLM:
    return open_llm(folder, skip_tokenizer_init=False, **options)


@torch.inference_mode()
def logits_of(model: Any, prompts: list[dict[str, list[int]]]) -> list[torch.Tensor]:
    return [model(torch.tensor([p["prompt_token_ids"]])).logits[0] for p in prompts]


@pytest.mark.parametrize("step_tokens", [7, 2048])
def test_a_decoders_classifier_gives_the_probabilities_of_transformers(
    tmp_path: Path, step_tokens: int
) -> None:
    from transformers import Qwen2ForSequenceClassification

    config = transformers_config("qwen2", num_labels=3, pad_token_id=0)
    model = save_random(Qwen2ForSequenceClassification(config), tmp_path)
    prompts = [{"prompt_token_ids": [max(t, 1) for t in p["prompt_token_ids"]]} for p in PROMPTS]
    with open_llm(tmp_path, max_num_batched_tokens=step_tokens) as llm:
        found = llm.classify(prompts, use_tqdm=False)
        each = [PoolingParams(use_activation=False)] * len(prompts)
        raw = llm.classify(prompts, each, use_tqdm=False)
        with pytest.raises(InputError, match=f"a list with those of each of {len(prompts)} prompt"):
            llm.classify(prompts, each[:1])
        assert llm.frontend.pooling is not None
        assert llm.frontend.pooling.labels == ["LABEL_0", "LABEL_1", "LABEL_2"]
        with pytest.raises(InputError, match="one label, and this one has 3"):
            llm.score("a", "b", use_tqdm=False)
    for output, logits, expected in zip(found, raw, logits_of(model, prompts), strict=True):
        np.testing.assert_allclose(logits.outputs.probs, expected, atol=1e-3, rtol=1e-4)
        np.testing.assert_allclose(output.outputs.probs, expected.softmax(-1), atol=1e-4)


def test_every_token_has_labels_in_token_classification(tmp_path: Path) -> None:
    from transformers import Qwen2ForTokenClassification

    model = save_random(
        Qwen2ForTokenClassification(transformers_config("qwen2", num_labels=2)), tmp_path
    )
    with open_llm(tmp_path, max_num_batched_tokens=9) as llm:
        found = llm.reward(PROMPTS, use_tqdm=False)
    for output, expected in zip(found, logits_of(model, PROMPTS), strict=True):
        np.testing.assert_allclose(output.outputs.data, expected.softmax(-1), atol=1e-4)
    # A process reward model's rewards stand at its steps.
    tag = PROMPTS[-1]["prompt_token_ids"][20]
    config = {"step_tag_id": tag}
    with open_llm(tmp_path, max_num_batched_tokens=9, pooler_config=config) as llm:
        found = llm.reward(PROMPTS, use_tqdm=False)
    for output, prompt, expected in zip(found, PROMPTS, logits_of(model, PROMPTS), strict=True):
        steps = torch.tensor(prompt["prompt_token_ids"]) == tag
        np.testing.assert_allclose(output.outputs.data, expected[steps].softmax(-1), atol=1e-4)
    assert len(found[-1].outputs.data) > 0


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_language_models_tokens_are_the_rewards_of_steps(tmp_path: Path, is_tied: bool) -> None:
    """As math-shepherd has it: of the logits at each step tag, those of two tokens."""
    from transformers import Qwen2ForCausalLM

    config = transformers_config("qwen2", tie_word_embeddings=is_tied)
    model = save_random(Qwen2ForCausalLM(config), tmp_path)
    tag = PROMPTS[-1]["prompt_token_ids"][20]
    pooler = {"pooling_type": "STEP", "step_tag_id": tag, "returned_token_ids": [9, 4]}
    with open_llm(tmp_path, max_num_batched_tokens=9, pooler_config=pooler) as llm:
        found = llm.reward(PROMPTS, use_tqdm=False)
    for output, prompt, logits in zip(found, PROMPTS, logits_of(model, PROMPTS), strict=True):
        steps = torch.tensor(prompt["prompt_token_ids"]) == tag
        expected = logits[steps][:, [9, 4]].softmax(-1)
        np.testing.assert_allclose(output.outputs.data, expected, atol=1e-4)
    assert len(found[-1].outputs.data) > 0
    with pytest.raises(ConfigError, match="step_tag_id is for models with labels"):
        open_llm(tmp_path, runner="pooling", pooler_config={"step_tag_id": tag})
    with pytest.raises(ConfigError, match="returned_token_ids must be below"):
        open_llm(tmp_path, pooler_config={"returned_token_ids": [10**6]})


def test_a_reward_model_has_two_layers_behind_each_token(tmp_path: Path) -> None:
    from transformers import Qwen2Model

    model = Qwen2Model(transformers_config("qwen2"))
    save_random(model, tmp_path)
    head = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    tensors |= {f"score.{name}": tensor for name, tensor in head.state_dict().items()}
    save_file({name: t.contiguous() for name, t in tensors.items()}, tmp_path / "model.safetensors")
    raw = json.loads((tmp_path / "config.json").read_text())
    raw |= {"architectures": ["Qwen2ForRewardModel"], "num_labels": 1}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with open_llm(tmp_path, pooler_config={"use_activation": False}) as llm:
        found = llm.reward(PROMPTS, use_tqdm=False)
    for output, prompt in zip(found, PROMPTS, strict=True):
        with torch.inference_mode():
            states = model(torch.tensor([prompt["prompt_token_ids"]])).last_hidden_state[0]
            expected = head(states)
        np.testing.assert_allclose(output.outputs.data, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_reranker_answers_yes_or_no_within_its_template(tmp_path: Path, is_tied: bool) -> None:
    from transformers import Qwen3ForCausalLM

    folder = tmp_path / "Qwen3-Reranker-tiny"
    config = transformers_config("qwen3", tie_word_embeddings=is_tied)
    model = save_random(Qwen3ForCausalLM(config), folder)
    tokenizer = write_tokenizer(folder, is_bert=False)
    with open_text(folder) as llm:
        scores = llm.score("the cat", ["it left", "a mat"], instruction="then", use_tqdm=False)
        (default,) = llm.score("the cat", "it left", use_tqdm=False)
        (cut,) = llm.score("the cat", "it left " * 300, truncate_prompt_tokens=100, use_tqdm=False)
        assert len(cut.prompt_token_ids) == 100
        with pytest.raises(InputError, match="truncate_prompt_tokens"):
            llm.score("the cat", "it left " * 300, use_tqdm=False)
    for output, document in zip(scores, ["it left", "a mat"], strict=True):
        text = QWEN3_RERANKER.format(instruction="then", query="the cat", document=document)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert output.prompt_token_ids == ids
        (logits,) = logits_of(model, [{"prompt_token_ids": ids}])
        no, yes = (logits[-1, tokenizer.token_to_id(word)] for word in ("no", "yes"))
        assert output.outputs.score == pytest.approx(float((yes - no).sigmoid()), abs=1e-4)
    assert default.prompt_token_ids != scores[0].prompt_token_ids


def test_a_generator_that_is_to_classify_needs_a_classifier(tmp_path: Path) -> None:
    from transformers import Qwen2ForCausalLM

    save_random(Qwen2ForCausalLM(transformers_config("qwen2")), tmp_path)
    with pytest.raises(ModelError, match=r"lacks score.weight"):
        open_llm(tmp_path, runner="pooling", convert="classify")


BERT = {
    "vocab_size": len(SPECIAL) + len(WORDS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def test_a_cross_encoder_knows_which_text_is_which(tmp_path: Path) -> None:
    model = save_random(BertForSequenceClassification(BertConfig(**BERT, num_labels=1)), tmp_path)
    tokenizer = write_tokenizer(tmp_path, is_bert=True)
    pairs = [("the cat sat", "on a mat"), ("the cat sat", "it left and then sat on a mat")]
    with open_text(tmp_path) as llm:
        found = llm.score(pairs[0][0], [document for _, document in pairs], use_tqdm=False)
        swapped = llm.score(pairs[0][1], pairs[0][0], use_tqdm=False)
        (cut,) = llm.score("the cat", "mat " * 100, truncate_prompt_tokens=10, use_tqdm=False)
        (raw,) = llm.score(*pairs[0], pooling_params=PoolingParams(use_activation=False))
        with pytest.raises(InputError, match="pooling_params of score may set use_activation only"):
            llm.score("a", "b", pooling_params=PoolingParams(dimensions=3))
        with pytest.raises(InputError, match="chat_template='x' is not supported here: set score"):
            llm.score("a", "b", chat_template="x")
        with pytest.raises(InputError, match="data_2 must be a text or a list of texts, got"):
            llm.score("a", {"content": [{"type": "text", "text": "b"}]})
    assert 1 / (1 + np.exp(-raw.outputs.score)) == pytest.approx(found[0].outputs.score, abs=1e-5)
    for output, (query, document) in zip(found, pairs, strict=True):
        encoding = tokenizer.encode(query, document)
        assert output.prompt_token_ids == encoding.ids
        with torch.inference_mode():
            logits = model(
                torch.tensor([encoding.ids]), token_type_ids=torch.tensor([encoding.type_ids])
            ).logits
        assert output.outputs.score == pytest.approx(float(logits.sigmoid()), abs=1e-5)
    assert swapped[0].outputs.score != found[0].outputs.score
    assert cut.prompt_token_ids == tokenizer.encode("the cat", "mat " * 5).ids


def test_pooler_config_is_checked() -> None:
    for wrong, words in [
        ({"pooling": "MEAN"}, "must not contain 'pooling'"),
        ({"pooling_type": "MEDIAN"}, "pooling_type must be CLS, LAST, MEAN, ALL or STEP"),
        ({"pooling_type": "STEP"}, "STEP needs a step_tag_id"),
        ({"pooling_type": "LAST", "step_tag_id": 5}, "set it to STEP, not LAST"),
        ({"returned_token_ids": []}, "returned_token_ids must be a list of token ids"),
        ({"returned_token_ids": [1], "classifier_from_token": ["a"]}, "drop one"),
        ({"dimensions": 5}, "dimensions must be a list"),
        ({"score_template": "{query}"}, "score_template must be a text with"),
    ]:
        with pytest.raises(ConfigError, match=words):
            LLM(runner="pooling", pooler_config=wrong)
    with pytest.raises(ConfigError, match="are for runner=pooling"):
        LLM(runner="generate", convert="embed")
