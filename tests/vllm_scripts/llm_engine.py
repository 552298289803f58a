import argparse

from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm.utils import FlexibleArgumentParser


def process_requests(engine: LLMEngine, prompts: list[tuple[str, SamplingParams]]) -> list[str]:
    request_id = 0
    finished = []
    while prompts or engine.has_unfinished_requests():
        if prompts:
            prompt, sampling_params = prompts.pop(0)
            engine.add_request(str(request_id), prompt, sampling_params)
            request_id += 1
        request_outputs: list[RequestOutput] = engine.step()
        finished += [output.request_id for output in request_outputs if output.finished]
    return finished


def main(args: argparse.Namespace):
    engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(args))
    prompts = [
        ("A robot may not injure", SamplingParams(temperature=0.0, logprobs=1, max_tokens=5)),
        ("To be or not to be,", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2)),
        ("What is the meaning of life?", SamplingParams(n=2, temperature=0.8, top_p=0.95)),
    ]
    finished = process_requests(engine, prompts)
    assert sorted(finished) == ["0", "1", "2"]


if __name__ == "__main__":
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    main(parser.parse_args(["--model", "facebook/opt-125m", "--max_num_seqs", "8"]))
