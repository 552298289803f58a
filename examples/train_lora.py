"""Trains a LoRA adapter with peft: the default model learns to route support tickets.

    pip install -e . peft transformers gguf
    python examples/train_lora.py tickets
    penstock serve --enable-lora --lora-modules tickets=./tickets

A ticket's answer is one of four departments. The base model chats about the ticket instead.
docs/lora.md continues from here.
"""

from __future__ import annotations

import argparse
import itertools
import random
from pathlib import Path
from typing import Any

import torch

SUBJECTS = {
    "billing": [
        "I was charged twice", "my invoice is wrong", "the refund has not arrived",
        "my card was declined", "the discount is missing", "I want my money back",
    ],
    "shipping": [
        "my parcel is late", "the box arrived damaged", "the courier left it outside",
        "the tracking number does not work", "it went to my old address", "nothing was delivered",
    ],
    "technical": [
        "the app crashes", "the screen stays black", "I see error 42", "the sound is gone",
        "the update will not install", "the login page does not load",
    ],
    "sales": [
        "do you have larger sizes", "is there a yearly plan", "what does the pro version cost",
        "can I order a hundred of them", "when is it in stock again", "do you sell gift cards",
    ],
}  # fmt: skip
OPENINGS = ["Hello,", "Hi there!", "Good morning,", "Hey,", "To whom it may concern:", ""]
ENDINGS = ["Please help.", "Thank you.", "What now?", "Best regards", "This is urgent!", ""]


def tickets() -> list[tuple[str, str]]:
    """Texts with their departments, in random order."""
    made = [
        (f"{opening} {subject}. {ending}".strip(), department)
        for department, subjects in SUBJECTS.items()
        for opening, subject, ending in itertools.product(OPENINGS, subjects, ENDINGS)
    ]
    random.Random(0).shuffle(made)
    return made


def load_model(name: str | None) -> tuple[Any, Any]:
    """A model in float32 and its tokenizer: a folder, or Penstock's default model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {"pretrained_model_name_or_path": name}
    if name is None:
        from penstock.config import EngineConfig
        from penstock.loading.source import resolve_source

        config = EngineConfig()
        path = resolve_source(config.model, config.load).path
        where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(**where)


def encode(tokenizer: Any, ticket: str, department: str) -> tuple[list[int], list[int]]:
    """The tokens of a conversation, and labels that cover the answer alone."""
    messages = [{"role": "user", "content": ticket}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
    answer_ids = [*tokenizer.encode(department, add_special_tokens=False), tokenizer.eos_token_id]
    return prompt_ids + answer_ids, [-100] * len(prompt_ids) + answer_ids


def batch_of(tokenizer: Any, examples: list[tuple[str, str]]) -> dict[str, torch.Tensor]:
    rows = [encode(tokenizer, *example) for example in examples]
    longest = max(len(ids) for ids, _ in rows)

    def padded(values: list[int], filler: int) -> list[int]:
        return values + [filler] * (longest - len(values))

    return {
        "input_ids": torch.tensor([padded(ids, 0) for ids, _ in rows]),
        "attention_mask": torch.tensor([padded([1] * len(ids), 0) for ids, _ in rows]),
        "labels": torch.tensor([padded(labels, -100) for _, labels in rows]),
    }


def train(output: Path, model_name: str | None, num_steps: int, batch_size: int) -> float:
    """Train and save the adapter. Returns the last step's loss."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    base, tokenizer = load_model(model_name)
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    optimizer = torch.optim.AdamW(
        (parameter for parameter in model.parameters() if parameter.requires_grad), lr=1e-3
    )
    examples = itertools.cycle(tickets())
    loss = torch.tensor(0.0)
    for step in range(1, num_steps + 1):
        batch = batch_of(tokenizer, list(itertools.islice(examples, batch_size)))
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0 or step == num_steps:
            print(f"step {step} of {num_steps}: loss {loss.item():.4f}", flush=True)
    model.save_pretrained(output)
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a LoRA adapter on support tickets.")
    parser.add_argument("output", type=Path, help="Folder to write the adapter to.")
    parser.add_argument("--model", help="Hugging Face folder (default: Penstock's default model)")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=4)
    args = parser.parse_args()
    train(args.output, args.model, args.steps, args.batch_size)
    print(f"Wrote the adapter to {args.output}")


if __name__ == "__main__":
    main()
