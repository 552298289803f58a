from vllm import LLM

llm = LLM(model="facebook/opt-125m", enforce_eager=True, trust_remote_code=False)
params = llm.get_default_sampling_params()
params.max_tokens = 8
conversation = [
    {"role": "system", "content": "You are a helpful assistant"},
    {"role": "user", "content": "Hello"},
]
one = llm.chat(conversation, params)
several = llm.chat([conversation] * 3, sampling_params=params, use_tqdm=False)
for output in one + several:
    print(output.outputs[0].text)
assert len(several) == 3
tokenizer = llm.get_tokenizer()
text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
assert several[0].prompt_token_ids == tokenizer.encode(text, add_special_tokens=False)
