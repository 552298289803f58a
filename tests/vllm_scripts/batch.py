from vllm import LLM, SamplingParams, TextPrompt, TokensPrompt

llm = LLM("facebook/opt-125m", max_num_batched_tokens=64, seed=0, scheduling_policy="priority")
prompts = [TextPrompt(prompt="Hello"), TokensPrompt(prompt_token_ids=[5, 6, 7]), "A"]
params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in (2, 3, 4)]
lengths = [
    len(output.outputs[0].token_ids)
    for output in llm.generate(prompts, params, use_tqdm=False, priority=[1, 0, 2])
]
assert lengths == [2, 3, 4]
ids = llm.enqueue(prompts, params)
more = llm.enqueue("One more", params[0].clone())
beside = llm.generate("Beside them", params[2], use_tqdm=False)
outputs = llm.wait_for_completion(use_tqdm=False)
assert [output.request_id for output in outputs] == ids + more
assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 3, 4, 2]
assert len(beside[0].outputs[0].token_ids) == 4
