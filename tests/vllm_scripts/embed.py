from vllm import LLM, PoolingParams
from vllm.config import PoolerConfig
from vllm.utils.print_utils import print_embeddings

llm = LLM(
    model="facebook/opt-125m",
    runner="pooling",
    enforce_eager=True,
    pooler_config=PoolerConfig(task="embed"),
)
outputs = llm.embed(["Hello, my name is", "The capital of France is"])
for output in outputs:
    embedding = output.outputs.embedding
    print_embeddings(embedding)
assert abs(sum(float(x) ** 2 for x in outputs[0].outputs.embedding) - 1) < 1e-3
params = PoolingParams(use_activation=False)
(raw,) = llm.encode("Hello", pooling_params=params, pooling_task="embed")
print(raw.outputs.data.shape)
(score,) = llm.score("What is the capital of France?", ["Paris"])
assert -1.001 <= score.outputs.score <= 1.001
