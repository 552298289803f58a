import asyncio
import uuid

from vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams

engine = AsyncLLMEngine.from_engine_args(
    AsyncEngineArgs("facebook/opt-125m", max_model_len=128, num_gpu_blocks_override=64)
)


async def complete(prompt: str) -> str:
    final = None
    params = SamplingParams(temperature=0, max_tokens=6)
    async for output in engine.generate(prompt, params, str(uuid.uuid4())):
        final = output
    return final.outputs[0].text


async def abort_early() -> str:
    reason = None
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    async for output in engine.generate("Tell me a story.", params, request_id="story"):
        reason = output.outputs[0].finish_reason
        if len(output.outputs[0].token_ids) >= 2 and reason is None:
            await engine.abort("story")
    return reason


async def main():
    tokenizer = await engine.get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("abc")) == "abc"
    texts = await asyncio.gather(*(complete("Once upon a time") for _ in range(4)))
    assert len(set(texts)) == 1
    assert await abort_early() == "abort"
    engine.shutdown()


asyncio.run(main())
