from vllm import LLM

llm = LLM(model="facebook/opt-125m", enable_sleep_mode=True)
llm.sleep(level=1)
