from vllm import LLM, SamplingParams
from vllm.sampling_params import GuidedDecodingParams

llm = LLM(model="facebook/opt-125m")
params = SamplingParams(guided_decoding=GuidedDecodingParams(choice=["a", "b"]))
print(llm.generate("a or b?", params)[0].outputs[0].text)
