from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

llm = LLM(
    model="facebook/opt-125m", enable_lora=True, max_loras=1, max_lora_rank=8, max_cpu_loras=2
)
params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
prompts = ["Write a SQL query: how many users?", "Write a SQL query: the oldest user"]
plain = llm.generate(prompts, params)
adapted = llm.generate(prompts, params, lora_request=LoRARequest("sql", 1, "org/sql-adapter"))
for before, after in zip(plain, adapted, strict=True):
    print(before.outputs[0].text, "->", after.outputs[0].text)
assert [one.outputs[0].token_ids for one in plain] != [one.outputs[0].token_ids for one in adapted]
