from vllm import LLM
from vllm.sampling_params import BeamSearchParams

llm = LLM(model="facebook/opt-125m", max_num_seqs=16, swap_space=4)
outputs = llm.beam_search([{"prompt": "Hello"}], BeamSearchParams(beam_width=3, max_tokens=4))
for sequence in outputs[0].sequences:
    print(sequence.cum_logprob, sequence.text)
assert len(outputs[0].sequences) == 3
