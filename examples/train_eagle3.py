"""Trains an EAGLE-3 head for the default model, on text that the model generates itself.

    python examples/train_eagle3.py head
    penstock serve --speculative-config '{"method": "eagle3", "model": "./head"}'

or `penstock serve ./head`, which names the model that it was trained for.

Takes some minutes on two CPU cores. While the model generates, a drafter that proposes nothing
records the hidden states that a head will read. The head then learns to predict the model's next
tokens from them: the first from the model's states, each further one from its own. At the end the
engine serves prompts that were not trained on, with the head, and prints how many drafts were
accepted. docs/speculation.md has the numbers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from penstock import LLM, SamplingParams
from penstock.models.base import Hidden
from penstock.models.eagle3 import aux_layers
from penstock.protocol.step import NewRequest
from penstock.runner.drafter import Drafter, Drafts, DraftSetup, DraftStep
from penstock.runner.forward import ForwardInputs

TASKS = (
    "Explain {} to a child.", "What are three facts about {}?", "Write a short story about {}.",
    "Give me five tips about {}.", "Why is {} important?", "Write a poem about {}.",
    "How would you describe {} to someone who has never heard of it?", "Summarize what {} is.",
    "List the advantages and disadvantages of {}.", "Write an email to a friend about {}.",
)  # fmt: skip
SUBJECTS = (
    "the ocean", "cooking", "the moon", "bicycles", "music", "the Roman Empire", "bees", "money",
    "gardening", "computers", "volcanoes", "friendship", "trains", "chess", "winter", "coffee",
    "the human heart", "recycling", "mathematics", "dogs", "books", "airplanes", "sleep", "rivers",
    "photography", "the internet", "honesty", "football", "bread", "history", "rain", "robots",
    "mountains", "vaccines", "painting", "democracy", "trees", "electricity", "tea", "travel",
)  # fmt: skip
NUM_TESTED = 16  # prompts that are not trained on
DECAY = 0.8  # weight of each further draft in the loss


def make_prompts() -> list[Any]:
    """Conversations in random order."""
    texts = [task.format(subject) for task, subject in itertools.product(TASKS, SUBJECTS)]
    random.Random(0).shuffle(texts)
    return [[{"role": "user", "content": text}] for text in texts]


# -- what the model generates


@dataclass
class Text:
    """A prompt and its output, as far as the model computed it."""

    num_prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    aux: list[Tensor] = field(default_factory=list)  # [rows, layers * hidden_size]
    states: list[Tensor] = field(default_factory=list)  # [rows, hidden_size], after the last norm


class Recorder(Drafter):
    """Proposes nothing, and keeps the hidden states of every token."""

    num_drafts = 1
    is_on_host = True

    def __init__(self) -> None:
        self.texts: list[Text] = []
        self._by_slot: dict[int, Text] = {}

    def load(self, setup: DraftSetup) -> None:
        target, self.settings = setup.target, dict(setup.source.config)
        self.model_name = setup.config.model.model
        target.aux_layers = aux_layers({}, int(self.settings["num_hidden_layers"]))
        self.aux_layers = list(target.aux_layers)
        everything = torch.arange(target.vocab_size)
        self.embedding = target.embed(everything).float().clone()  # [vocab_size, hidden_size]
        units = Hidden(torch.eye(target.hidden_size).to(target.embed(everything[:1]).dtype))
        self.output = target.logits(units, slice(None)).float().T.contiguous()  # like embedding

    def add(self, slot: int, request: NewRequest) -> None:
        self._by_slot[slot] = Text(request.num_prompt_tokens)
        self.texts.append(self._by_slot[slot])

    def observe(self, inputs: ForwardInputs, hidden: Hidden) -> None:
        aux, slots = torch.cat(hidden.aux, dim=-1).float(), inputs.context.token_slots
        for slot in set(slots.tolist()):
            text, own = self._by_slot[slot], slots == slot
            text.token_ids += inputs.token_ids[own].tolist()
            text.aux.append(aux[own])
            text.states.append(hidden.states[own].float())

    def propose(self, step: DraftStep) -> Drafts:
        nothing = torch.zeros(len(step.slots), step.num_drafts, dtype=torch.int64)
        return Drafts(nothing, np.zeros(len(step.slots), dtype=np.int64))


def generate(llm: LLM, prompts: Sequence[Any], num_tokens: int) -> list[Any]:
    """Outputs for conversations, or for prompts in tokens."""
    params = SamplingParams(temperature=0.7, top_p=0.95, seed=0, max_tokens=num_tokens)
    run = llm.chat if isinstance(prompts[0], list) else llm.generate
    outputs: list[Any] = run(list(prompts), params, use_tqdm=True)
    return outputs


# -- the head


def rotate(x: Tensor, theta: float) -> Tensor:
    """Rotary position embedding of [..., length, head_dim]."""
    half = x.shape[-1] // 2
    speeds = theta ** -(torch.arange(half) / half)
    angles = torch.outer(torch.arange(x.shape[-2]).float(), speeds)
    cos, sin, first, second = angles.cos(), angles.sin(), x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Head(nn.Module):
    """One decoder layer over embeddings and hidden states. Names are those of the files."""

    def __init__(self, settings: dict[str, Any], num_aux: int, vocab_size: int) -> None:
        super().__init__()
        size, inner = settings["hidden_size"], settings["intermediate_size"]
        self.num_heads = settings["num_attention_heads"]
        self.num_kv_heads = settings.get("num_key_value_heads") or self.num_heads
        self.head_dim = settings.get("head_dim") or size // self.num_heads
        self.theta = float(settings.get("rope_theta") or 10000.0)
        eps, kv = settings["rms_norm_eps"], self.num_kv_heads * self.head_dim
        self.fc = nn.Linear(num_aux * size, size, bias=False)
        self.layer = nn.ModuleDict(
            {
                "hidden_norm": nn.RMSNorm(size, eps),
                "input_layernorm": nn.RMSNorm(size, eps),
                "self_attn": nn.ModuleDict(
                    {
                        "q_proj": nn.Linear(2 * size, self.num_heads * self.head_dim, bias=False),
                        "k_proj": nn.Linear(2 * size, kv, bias=False),
                        "v_proj": nn.Linear(2 * size, kv, bias=False),
                        "o_proj": nn.Linear(self.num_heads * self.head_dim, size, bias=False),
                    }
                ),
                "post_attention_layernorm": nn.RMSNorm(size, eps),
                "mlp": nn.ModuleDict(
                    {
                        "gate_proj": nn.Linear(size, inner, bias=False),
                        "up_proj": nn.Linear(size, inner, bias=False),
                        "down_proj": nn.Linear(inner, size, bias=False),
                    }
                ),
            }
        )
        self.norm = nn.RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, vocab_size, bias=False)

    def forward(self, embedded: Tensor, aux: Tensor, num_drafts: int) -> list[Tensor]:
        """Logits [batch, length, vocab] of each draft, given the true tokens before it.

        Row p has the embedding of token p, and predicts token p + 1. For the first draft, the
        hidden state before it is the target's; for the next one, that of the first draft's row
        p - 1, and so on. Rows before `draft` are not meaningful.
        """
        before = _shift(self.fc(aux), 1)
        keys, values, logits = list[Tensor](), list[Tensor](), list[Tensor]()
        for _ in range(num_drafts):
            hidden = self._layer(embedded, before, keys, values)
            logits.append(self.lm_head(self.norm(hidden)))
            before = _shift(hidden, 1)
        return logits

    def _layer(self, x: Tensor, before: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        layer: Any = self.layer
        x = torch.cat([layer["input_layernorm"](x), layer["hidden_norm"](before)], dim=-1)
        hidden = before + self._attend(layer["self_attn"], x, keys, values)
        x, mlp = layer["post_attention_layernorm"](hidden), layer["mlp"]
        x = functional.silu(mlp["gate_proj"](x)) * mlp["up_proj"](x)
        return hidden + mlp["down_proj"](x)  # type: ignore[no-any-return]

    def _attend(self, layer: Any, x: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Attention of draft number `len(keys)`.

        It sees the target's rows up to the first draft's, and then one row of each earlier draft.
        """

        def heads(name: str) -> Tensor:  # [batch, heads, length, head_dim]
            split: Tensor = layer[name](x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            return split.repeat_interleave(self.num_heads // split.shape[1], dim=1)

        depth, length = len(keys), x.shape[1]
        query = rotate(heads("q_proj"), self.theta) * self.head_dim**-0.5
        keys.append(rotate(heads("k_proj"), self.theta))
        values.append(heads("v_proj"))
        distance = torch.arange(length)[:, None] - torch.arange(length)
        scores = query @ keys[0].transpose(-1, -2)
        scores = scores.masked_fill(distance < depth, float("-inf"))
        later = range(1, depth + 1)
        own = [(query * _shift(keys[j], depth - j, 2)).sum(-1, keepdim=True) for j in later]
        weights = torch.cat([scores, *own], dim=-1).softmax(dim=-1)
        out = weights[..., :length] @ values[0]
        for j in later:
            out = out + weights[..., length + j - 1, None] * _shift(values[j], depth - j, 2)
        attended: Tensor = layer["o_proj"](out.transpose(1, 2).flatten(2))
        return attended


def _shift(x: Tensor, count: int, dim: int = 1) -> Tensor:
    """Move rows towards the end. The first ones become zeros."""
    if count == 0:
        return x
    zeros = torch.zeros_like(x.narrow(dim, 0, count))
    return torch.cat([zeros, x.narrow(dim, 0, x.shape[dim] - count)], dim=dim)


# -- training


def choose_vocabulary(texts: Sequence[Text], size: int, vocab_size: int) -> Tensor:
    """The tokens that the head can draft: the most frequent ones in the outputs, in order."""
    counts = Counter(token for text in texts for token in text.token_ids[text.num_prompt_tokens :])
    ids = [token for token, _ in counts.most_common(size)]
    others = (token for token in range(vocab_size) if token not in counts)
    return torch.tensor(sorted([*ids, *itertools.islice(others, size - len(ids))]))


def train(
    recorder: Recorder, vocabulary: Tensor, num_steps: int, batch_size: int, num_drafts: int
) -> tuple[Head, list[float]]:
    """Returns the head and the loss of each step."""
    torch.manual_seed(0)
    head = Head(recorder.settings, len(recorder.aux_layers), len(vocabulary))
    output = recorder.output[vocabulary]
    with torch.no_grad():
        head.lm_head.weight.copy_(output)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, num_steps, pct_start=0.1)
    order = random.Random(0)
    losses = list[float]()
    progress = tqdm(range(num_steps), desc="training", unit="step")
    for _ in progress:
        texts = order.sample(recorder.texts, min(batch_size, len(recorder.texts)))
        loss = _loss(head, texts, recorder.embedding, output, num_drafts)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        progress.set_postfix(loss=f"{losses[-1]:.3f}")
    return head, losses


def _loss(
    head: Head, texts: Sequence[Text], embedding: Tensor, output: Tensor, num_drafts: int
) -> Tensor:
    """Cross-entropy between the target's distribution and that of each draft."""
    padded = nn.utils.rnn.pad_sequence
    token_ids = padded([torch.tensor(text.token_ids) for text in texts], batch_first=True)
    aux = padded([torch.cat(text.aux) for text in texts], batch_first=True)
    states = padded([torch.cat(text.states) for text in texts], batch_first=True)
    rows = torch.arange(token_ids.shape[1])
    first = torch.tensor([text.num_prompt_tokens - 1 for text in texts])[:, None]
    ends = torch.tensor([len(text.token_ids) for text in texts])[:, None]
    target = (states @ output.T).softmax(dim=-1)
    loss, weight = torch.zeros(()), 1.0
    for draft, logits in enumerate(head(embedding[token_ids], aux, num_drafts)):
        counts = (rows >= first + draft) & (rows < ends)  # of generated tokens
        terms = -(target[counts] * logits[counts].log_softmax(dim=-1)).sum(-1)
        loss, weight = loss + weight * terms.mean(), weight * DECAY
    return loss


def save(head: Head, folder: Path, recorder: Recorder, vocabulary: Tensor, num_drafts: int) -> None:
    """Write the head as the speculators library does."""
    tensors = {
        name.replace("layer.", "layers.0.", 1) if name.startswith("layer.") else name: tensor
        for name, tensor in head.state_dict().items()
    }
    vocab_size = len(recorder.embedding)
    tensors["d2t"] = vocabulary - torch.arange(len(vocabulary))
    tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, vocabulary, True)
    settings = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": len(vocabulary),
        "eagle_aux_hidden_state_layer_ids": recorder.aux_layers,
        "norm_before_residual": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_drafts}],
            "verifier": {
                "name_or_path": recorder.model_name,
                "architectures": recorder.settings["architectures"],
            },
        },
        "transformer_layer_config": {
            **{key: value for key, value in recorder.settings.items() if key != "architectures"},
            "model_type": "llama",
            "num_hidden_layers": 1,
            "vocab_size": vocab_size,
            "tie_word_embeddings": False,
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    save_file(tensors, folder / "model.safetensors")


def measure(
    folder: Path, prompts: Sequence[Any], num_tokens: int, num_drafts: int, **options: Any
) -> list[float]:
    """The share of proposals whose first draft was accepted, whose first two were, and so on."""
    config = {
        "method": "eagle3",
        "model": str(folder),
        "num_speculative_tokens": num_drafts,
        "adaptive": False,
    }
    with LLM(speculative_config=config, **options) as llm:
        generate(llm, prompts, num_tokens)
        stats = llm.engine.speculation_stats()
        assert stats is not None
        return [count / stats.num_drafts for count in stats.num_accepted_tokens_per_pos]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path, help="Folder to write the head to.")
    parser.add_argument("--model", help="(default: Penstock's default model)")
    parser.add_argument("--prompts", type=int, default=384, help="To generate from, at most 384.")
    parser.add_argument("--max-tokens", type=int, default=128, help="Of each output.")
    parser.add_argument("--vocabulary", type=int, default=4096, help="Tokens to draft from.")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=4, help="Outputs in a step.")
    parser.add_argument("--drafts", type=int, default=3, help="To train for.")
    parser.add_argument("--threads", type=int, help="(default: all cores)")
    args = parser.parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    options = {"model": args.model, "cpu_threads": args.threads, "log_level": "error"}
    options = {key: value for key, value in options.items() if value is not None}
    prompts, recorder = make_prompts(), Recorder()
    with LLM(drafter=recorder, enable_prefix_caching=False, **options) as llm:
        generate(llm, prompts[NUM_TESTED : NUM_TESTED + args.prompts], args.max_tokens)
    vocabulary = choose_vocabulary(recorder.texts, args.vocabulary, len(recorder.embedding))
    head, _ = train(recorder, vocabulary, args.steps, args.batch_size, args.drafts)
    save(head, args.output, recorder, vocabulary, args.drafts)
    shares = measure(args.output, prompts[:NUM_TESTED], args.max_tokens, args.drafts, **options)
    for position, share in enumerate(shares, start=1):
        print(f"the first {position} of the drafts were accepted in {share:.0%} of the steps")
    print(f"{1 + sum(shares):.2f} tokens per step. Wrote the head to {args.output}")


if __name__ == "__main__":
    main()
