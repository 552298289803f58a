"""What speculative decoding gains on a CPU with the default model, and what it costs.

    python benchmarks/cpu_speculation.py --threads 2 --rounds 5

Engines with and without it run the same requests in turn. Tasks:

    copy    repeat a text                                      ngram, one stream
    edit    repeat a text with changes                         ngram, one stream
    agent   steps of a loop whose outputs resemble each other  suffix, one stream
    chat    questions, sampled                                 both, one stream
    many    the same questions, 16 streams at once             both

With `--head FOLDER`, an EAGLE-3 head, such as examples/train_eagle3.py writes, also drafts in the
last two. One more task shows what it costs while a prompt is computed:

    prompt  a prompt of about 1,200 tokens: the numbers are those of prompt tokens

Prompts differ from round to round, so that no engine has seen an output before. They are prefilled
first: the times are those of decoding. Prints medians of the ratios on / off of output tokens per
second and per second of CPU time (which other load on the machine changes least), and the mean
acceptance length: the tokens of a step that verifies drafts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock import LLM, SamplingParams

TEXT = Path(__file__).parents[1].joinpath("LICENSE").read_text().split("\n\n")
TEXTS = [" ".join(part.split()) for part in TEXT if 250 < len(part) < 900]
CODE = """\
def total_{name}(items, limit):
    total = 0
    for item in items:
        if item.{name} > limit:
            total = total + item.{name}
    return total
"""
NAMES = ("price", "weight", "size", "length", "age", "score", "speed", "depth")
QUESTIONS = (
    "Why is the sky blue?",
    "Give me three tips for learning to cook.",
    "What is the difference between a lake and a sea?",
    "Write a short story about a lighthouse.",
    "How does a bicycle stay upright?",
    "Explain photosynthesis to a child.",
    "What should I pack for a week in the mountains?",
    "Who was Ada Lovelace?",
)
STEPS = ("Berlin", "Madrid", "Oslo", "Lima", "Cairo", "Delhi", "Tokyo", "Quito")
Requests = tuple[list[str], SamplingParams]


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens)


def copy(round_number: int) -> Requests:
    text = TEXTS[round_number % len(TEXTS)]
    return [f"Repeat the following text exactly, word for word:\n\n{text}"], greedy(160)


def edit(round_number: int) -> Requests:
    code = CODE.format(name=NAMES[round_number % len(NAMES)])
    return [f"Rename `total` to `result` in this code:\n\n{code}"], greedy(120)


def agent(round_number: int) -> Requests:
    """The outputs of earlier steps are past outputs by then."""
    system = (
        "You are a travel agent. Answer with a JSON object with the keys city, country, language, "
        "currency, three sights and three dishes."
    )
    return [f"{system}\n\nThe city is {STEPS[round_number % len(STEPS)]}."], greedy(160)


def chat(round_number: int) -> Requests:
    sampled = SamplingParams(temperature=0.7, top_p=0.95, seed=round_number, max_tokens=96)
    return [QUESTIONS[round_number % len(QUESTIONS)]], sampled


def many(round_number: int) -> Requests:
    return [*QUESTIONS, *QUESTIONS[::-1]], chat(round_number)[1]


def prompt(round_number: int) -> Requests:
    return [f"Text number {round_number} is this:\n\n{' '.join(TEXTS)}"], greedy(1)


NGRAM: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 5}
SUFFIX: dict[str, Any] = {"method": "suffix"}
CASES = [
    (copy, NGRAM), (edit, NGRAM), (agent, SUFFIX),
    (chat, NGRAM), (chat, SUFFIX), (many, NGRAM), (many, SUFFIX),
]  # fmt: skip


def measure(llm: LLM, prompts: Sequence[str], params: SamplingParams) -> tuple[float, float, float]:
    """Tokens per second, tokens per second of CPU time, mean acceptance length."""
    messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
    is_prompt = params.max_tokens == 1
    if not is_prompt:
        llm.chat(messages, SamplingParams(max_tokens=1, speculative=False), use_tqdm=False)
    start, cpu_start = time.perf_counter(), time.process_time()
    outputs = llm.chat(messages, params, use_tqdm=False)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    choices = [output.outputs[0] for output in outputs]
    num_tokens = sum(len(choice.token_ids) for choice in choices)
    if is_prompt:
        num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    drafts = [choice.drafts for choice in choices if choice.drafts is not None]
    num_steps = sum(own.num_drafts for own in drafts)
    accepted = sum(own.num_accepted_tokens for own in drafts)
    length = 1 + accepted / num_steps if num_steps else 1.0
    return num_tokens / seconds, num_tokens / cpu_seconds, length


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", help="one task")
    parser.add_argument("--head", help="folder of an EAGLE-3 head for the default model")
    args = parser.parse_args()
    options: dict[str, Any] = {"cpu_threads": args.threads, "log_level": "error"}
    options["max_model_len"] = 2048
    engines = {
        "off": LLM(**options),
        "ngram": LLM(speculative_config=NGRAM, **options),
        "suffix": LLM(speculative_config=SUFFIX, **options),
    }
    cases = list(CASES)
    if args.head is not None:
        eagle3 = {"method": "eagle3", "model": args.head}
        engines["eagle3"] = LLM(speculative_config=eagle3, **options)
        cases += [(task, eagle3) for task in (chat, many, prompt)]
    print("task    method  tokens/s off    on  ratio  ratio (CPU)  acceptance length")
    for task, config in cases:
        if args.only not in (None, task.__name__):
            continue
        off, on = [], []
        for round_number in range(args.rounds + 1):
            order = [("off", off), (config["method"], on)]
            for name, results in order if round_number % 2 else order[::-1]:
                results.append(measure(engines[name], *task(round_number)))
        pairs = list(zip(off[1:], on[1:], strict=True))  # the first round warms up
        ratios = [statistics.median(new[at] / old[at] for old, new in pairs) for at in range(2)]
        speeds = [statistics.median(pair[at][0] for pair in pairs) for at in range(2)]
        length = statistics.mean(new[2] for _, new in pairs)
        print(
            f"{task.__name__:7} {config['method']:7} {speeds[0]:12.1f} {speeds[1]:5.1f} "
            f"{ratios[0]:6.2f} {ratios[1]:12.2f} {length:18.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
