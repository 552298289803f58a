"""Adapters of classifiers: peft saves the classifier as a whole beside the matrices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters import MakeCheckpoint
from safetensors.torch import load_file, save_file
from tiny_engine import open_llm, random_prompts
from tiny_models import save_random, transformers_config

from penstock import LoRARequest, PoolingParams
from penstock.cli.main import main
from penstock.protocol.errors import InputError

LENGTHS = (1, 3, 16, 40)
PROMPTS = [
    {"prompt_token_ids": [max(token, 1) for token in prompt["prompt_token_ids"]]}
    for prompt in random_prompts(0, *LENGTHS)
]
SIZES = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "num_labels": 3, "pad_token_id": 0,
}  # fmt: skip
LOGITS = PoolingParams(use_activation=False)


def decoder(kind: str = "SequenceClassification") -> Any:
    import transformers

    config = transformers_config("qwen2", num_labels=3, pad_token_id=0)
    return getattr(transformers, f"Qwen2For{kind}")(config)


def encoder(name: str) -> Any:
    import transformers

    config = getattr(transformers, f"{name}Config")(**SIZES)
    return getattr(transformers, f"{name}ForSequenceClassification")(config)


def make_adapter(model: Any, folder: Path, seed: int, **settings: Any) -> Path:
    """Write a random adapter. `model` stays as it is."""
    import copy

    import peft

    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "task_type": "SEQ_CLS"} | settings)
    peft.get_peft_model(copy.deepcopy(model), config).save_pretrained(folder)
    file = folder / "adapter_model.safetensors"
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: tensor + 0.2 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in sorted(load_file(file).items())
    }
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@torch.inference_mode()
def peft_logits(model: Any, adapter: Path | None, prompts: list[Any]) -> list[torch.Tensor]:
    import copy

    import peft

    if adapter is not None:
        model = peft.PeftModel.from_pretrained(copy.deepcopy(model), adapter).eval()
    return [model(torch.tensor([prompt["prompt_token_ids"]])).logits[0] for prompt in prompts]


def request(folder: Path) -> LoRARequest:
    return LoRARequest(folder.name, 1, str(folder))


CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "decoder": (decoder, {"target_modules": ["q_proj", "v_proj", "down_proj"]}),
    "dora": (decoder, {"target_modules": ["q_proj", "score"], "use_dora": True,
                       "modules_to_save": []}),
    "bert": (lambda: encoder("Bert"), {"target_modules": ["query", "value"]}),
    "bert_dense": (lambda: encoder("Bert"), {"target_modules": ["query", "pooler.dense"]}),
    "roberta": (lambda: encoder("Roberta"), {"target_modules": ["query", "value"]}),
    "distilbert": (lambda: encoder("DistilBert"),
                   {"target_modules": ["q_lin"], "modules_to_save": ["pre_classifier",
                                                                     "classifier"]}),
    "modernbert": (lambda: encoder("ModernBert"), {"target_modules": ["Wqkv", "head.dense"]}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_classifiers_beside_the_base_give_the_logits_of_peft(tmp_path: Path, case: str) -> None:
    make, settings = CASES[case]
    model = make()
    base = tmp_path / "base"
    save_random(model, base)
    folders = [make_adapter(model, tmp_path / name, seed, **settings) for seed, name in
               enumerate(("one", "two"))]  # fmt: skip
    adapters = [None, *folders]
    with open_llm(base, enable_lora=True, max_loras=2) as llm:
        prompts = [prompt for prompt in PROMPTS for _ in adapters]
        requests = [None if one is None else request(one) for one in adapters] * len(PROMPTS)
        found = llm.classify(prompts, LOGITS, lora_request=requests, use_tqdm=False)
    logits = np.array([output.outputs.probs for output in found]).reshape(len(PROMPTS), 3, -1)
    for index, adapter in enumerate(adapters):
        expected = torch.stack(peft_logits(model, adapter, PROMPTS))
        np.testing.assert_allclose(logits[:, index], expected, atol=1e-3, rtol=1e-4)
    assert np.abs(logits[:, 0] - logits[:, 1]).max() > 0.1


def test_every_tokens_labels_are_those_of_its_adapter(tmp_path: Path) -> None:
    model = decoder("TokenClassification")
    base = tmp_path / "base"
    save_random(model, base)
    settings = {"task_type": "TOKEN_CLS", "target_modules": ["q_proj"], "bias": "all"}
    own = make_adapter(model, tmp_path / "own", 1, **settings)
    options = {"enable_lora": True, "max_num_batched_tokens": 9}  # prompts come in chunks
    with open_llm(base, **options) as llm:
        requests = [None, request(own)] * len(PROMPTS)
        prompts = [prompt for prompt in PROMPTS for _ in range(2)]
        found = llm.reward(prompts, LOGITS, lora_request=requests, use_tqdm=False)
    for first, adapter in enumerate((None, own)):
        expected = peft_logits(model, adapter, PROMPTS)
        for output, rows in zip(found[first::2], expected, strict=True):
            np.testing.assert_allclose(output.outputs.data, rows, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("case", ["decoder", "roberta"])
def test_merged_classifiers_give_the_logits_of_peft(tmp_path: Path, case: str) -> None:
    make, settings = CASES[case]
    model = make()
    base = tmp_path / "base"
    save_random(model, base)
    adapter = make_adapter(model, tmp_path / "own", 1, **settings)
    assert main(["merge", str(base), str(adapter), str(tmp_path / "merged")]) == 0
    expected = torch.stack(peft_logits(model, adapter, PROMPTS))
    for checkpoint, options in ((tmp_path / "merged", {}), (base, {"merge_lora": str(adapter)})):
        with open_llm(checkpoint, **options) as llm:
            found = llm.classify(PROMPTS, LOGITS, use_tqdm=False)
        logits = [output.outputs.probs for output in found]
        np.testing.assert_allclose(logits, expected, atol=1e-3, rtol=1e-4)


def test_a_language_model_and_an_adapter_with_a_classifier_are_a_merged_classifier(
    checkpoint_of: MakeCheckpoint, tmp_path: Path
) -> None:
    from transformers import Qwen2ForSequenceClassification

    base = checkpoint_of("qwen2")
    labels = {"num_labels": 3, "pad_token_id": 0}
    model = Qwen2ForSequenceClassification.from_pretrained(base, **labels).float().eval()
    adapter = make_adapter(model, tmp_path, 1, target_modules=["q_proj", "v_proj"])
    overrides = {"architectures": ["Qwen2ForSequenceClassification"], **labels}
    with open_llm(base, merge_lora=str(adapter), hf_overrides=overrides) as llm:
        found = llm.classify(PROMPTS, LOGITS, use_tqdm=False)
    expected = torch.stack(peft_logits(model, adapter, PROMPTS))
    logits = [output.outputs.probs for output in found]
    np.testing.assert_allclose(logits, expected, atol=1e-3, rtol=1e-4)


def test_a_classifier_with_other_labels_is_refused(tmp_path: Path) -> None:
    model = decoder()
    base = tmp_path / "base"
    save_random(model, base)
    adapter = make_adapter(model, tmp_path / "own", 1, target_modules=["q_proj"])
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.score.weight"
    with open_llm(base, enable_lora=True) as llm:
        for rows, why in ((tensors[name][:2], r"\[2, 64\].*\[3, 64\].*other labels"),
                          (tensors[name] / 0, "not finite")):  # fmt: skip
            save_file({**tensors, name: rows.contiguous()}, file)
            with pytest.raises(InputError, match=why):
                llm.classify(PROMPTS, lora_request=request(adapter), use_tqdm=False)
        assert len(llm.classify(PROMPTS, use_tqdm=False)) == len(PROMPTS)


def test_an_adapter_of_a_norms_bias_is_refused(tmp_path: Path) -> None:
    model = encoder("Bert")
    base = tmp_path / "base"
    save_random(model, base)
    adapter = make_adapter(model, tmp_path / "own", 1, target_modules=["query"], bias="all")
    with (
        open_llm(base, enable_lora=True) as llm,
        pytest.raises(InputError, match=r"LayerNorm.bias: only biases of linear layers"),
    ):
        llm.classify(PROMPTS, lora_request=request(adapter), use_tqdm=False)


def test_a_language_model_has_no_classifier_to_replace(
    checkpoint_of: MakeCheckpoint, tmp_path: Path
) -> None:
    adapter = make_adapter(decoder(), tmp_path / "own", 1, target_modules=["q_proj"])
    with (
        open_llm(checkpoint_of("qwen2"), enable_lora=True) as llm,
        pytest.raises(InputError, match=r"score was trained as a whole.*a classifier"),
    ):
        llm.generate(PROMPTS, lora_request=request(adapter), use_tqdm=False)
