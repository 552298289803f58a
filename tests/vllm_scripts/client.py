import json

from openai import OpenAI

client = OpenAI(api_key="EMPTY", base_url="http://localhost:8000/v1")
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "Say the colour of the sky."}]
text = ""
for chunk in client.chat.completions.create(
    messages=messages, model=model, stream=True, max_tokens=6, temperature=0
):
    text += chunk.choices[0].delta.content or ""
whole = client.chat.completions.create(
    messages=messages,
    model=model,
    max_completion_tokens=6,
    temperature=0,
    extra_body={"top_k": 1, "min_tokens": 0, "repetition_penalty": 1.0, "user": "me"},
)
assert whole.choices[0].message.content == text
coloured = client.chat.completions.create(
    messages=messages,
    model=model,
    max_tokens=20,
    extra_body={"structured_outputs": {"json": {"enum": ["blue", "grey"]}}},
)
assert json.loads(coloured.choices[0].message.content) in ("blue", "grey")
beams = client.completions.create(
    model=model, prompt="A robot may not injure", max_tokens=4, n=2, echo=False,
    extra_body={"use_beam_search": True},
)  # fmt: skip
assert beams.choices[0].text != beams.choices[1].text
