import json

from vllm import LLM, SamplingParams

tools = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
llm = LLM(model="facebook/opt-125m")
params = SamplingParams(max_tokens=8, temperature=0.0)
messages = [{"role": "user", "content": "What is the weather in Dallas?"}]
without = llm.chat(messages, sampling_params=params)[0]
output = llm.chat(messages, sampling_params=params, tools=tools)[0]
print(output.outputs[0].text.strip())
assert len(output.prompt_token_ids) > len(without.prompt_token_ids)
call = {"name": "get_weather", "arguments": json.dumps({"city": "Dallas"})}
messages.append(
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "abc123def", "type": "function", "function": call}],
    }
)
messages.append({"role": "tool", "content": "85 degrees", "tool_call_id": "abc123def"})
print(llm.chat(messages, params, tools=tools)[0].outputs[0].text.strip())
