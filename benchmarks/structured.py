"""The cost of structured output: constrained and free decoding, alternating, in one run.

    python benchmarks/structured.py
    python benchmarks/structured.py --batch 1 --threads 2 --structured-outputs-backend xgrammar

A batch of requests generates the same number of tokens with and without a JSON schema, alternating
in one engine. Every request has its own seed. The schema is an array of objects longer than the
output, so no request ends early. The script prints the times of each round, the median of their
ratios, and the compile time of the first grammar. It exits with status 1 if the ratio is above
--limit. Run nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

from penstock import LLM, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 24},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "kind": {"enum": ["person", "animal", "plant"]},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
            "score": {"type": "number"},
        },
        "required": ["name", "age", "kind", "tags", "score"],
        "additionalProperties": False,
    },
}
PROMPT = "A long list of people, animals and plants as JSON:\n"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, help="default: the number of cores")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--limit", type=float, default=1.1)
    parser.add_argument("--model", help="default: the engine's default model")
    parser.add_argument("--structured-outputs-backend", default="llguidance")
    return parser.parse_args()


def run(llm: LLM, args: argparse.Namespace, spec: StructuredOutputsParams | None) -> float:
    """Seconds to generate a batch."""
    params = [
        SamplingParams(
            max_tokens=args.tokens,
            temperature=args.temperature,
            seed=index,
            ignore_eos=True,
            structured_outputs=spec,
        )
        for index in range(args.batch)
    ]
    started = time.perf_counter()
    outputs = llm.generate([PROMPT] * args.batch, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    assert all(len(output.outputs[0].token_ids) == args.tokens for output in outputs)
    return seconds


def main() -> int:
    args = parse()
    options = {"model": args.model} if args.model else {}
    llm = LLM(
        cpu_threads=args.threads,
        structured_outputs_backend=args.structured_outputs_backend,
        max_num_seqs=args.batch,
        max_model_len=2048,
        log_level="warning",
        **options,
    )
    spec = StructuredOutputsParams(json=SCHEMA)
    with llm:
        run(llm, args, None)
        first = run(llm, args, spec)
        again = run(llm, args, spec)
        ratios = []
        for number in range(args.rounds):
            if number % 2:
                constrained, free = run(llm, args, spec), run(llm, args, None)
            else:
                free, constrained = run(llm, args, None), run(llm, args, spec)
            ratios.append(constrained / free)
            step_ms = 1e3 / args.tokens
            print(
                f"round {number}: free {free * step_ms:.2f} ms a step, "
                f"constrained {constrained * step_ms:.2f}, ratio {ratios[-1]:.3f}"
            )
    ratio = statistics.median(ratios)
    print(f"batch {args.batch}, {args.structured_outputs_backend}: median ratio {ratio:.3f}")
    print(f"the first request that asks for structured output waits {first - again:.2f} s")
    return 0 if ratio <= args.limit else 1


if __name__ == "__main__":
    sys.exit(main())
