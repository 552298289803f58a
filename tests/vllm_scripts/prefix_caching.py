from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

prefix = "You are an expert school principal, skilled in effectively managing a school. "
llm = LLM(model="facebook/opt-125m", enable_prefix_caching=True, gpu_memory_utilization=0.4)
params = SamplingParams(temperature=0.0, max_tokens=3)
first = llm.generate(prefix + "Draft 10 questions.", params)[0]
second = llm.generate(prefix + "Write a letter.", params)[0]
assert first.num_cached_tokens == 0
assert second.num_cached_tokens > 0
metrics = second.metrics
print(f"time to first token: {metrics.first_token_latency:.3f} s")
assert 0 < metrics.scheduled_ts <= metrics.first_token_ts <= metrics.last_token_ts
assert metrics.num_generation_tokens == 3
assert llm.reset_prefix_cache()
again = llm.generate(TokensPrompt(prompt_token_ids=second.prompt_token_ids), params)[0]
assert again.num_cached_tokens == 0
assert again.outputs[0].token_ids == second.outputs[0].token_ids
