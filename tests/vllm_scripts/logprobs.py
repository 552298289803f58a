from vllm import LLM, SamplingParams
from vllm.outputs import RequestOutput

llm = LLM(model="facebook/opt-125m", max_logprobs=25)
params = SamplingParams(
    temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=1, flat_logprobs=False, seed=1
)
output: RequestOutput = llm.generate("The capital of France is", params)[0]
for position in output.outputs[0].logprobs:
    best = next(iter(position.values()))
    print(best.rank, best.logprob, best.decoded_token)
    assert best.rank == 1
assert output.prompt_logprobs[0] is None
assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
assert output.outputs[0].cumulative_logprob < 0
