import asyncio

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM


async def stream(engine: AsyncLLM, prompt: str, request_id: str) -> list[int]:
    params = SamplingParams(
        max_tokens=12, temperature=0.8, seed=42, output_kind=RequestOutputKind.DELTA
    )
    token_ids = []
    async for output in engine.generate(
        request_id=request_id, prompt=prompt, sampling_params=params
    ):
        for completion in output.outputs:
            print(completion.text, end="", flush=True)
            token_ids += completion.token_ids
        if output.finished:
            print("\n[finished]")
            break
    return token_ids


async def main():
    args = AsyncEngineArgs(
        model="facebook/opt-125m", enforce_eager=True, max_model_len=128, num_gpu_blocks_override=64
    )
    engine = AsyncLLM.from_engine_args(args)
    try:
        first = await stream(engine, "The future of AI is", "stream-1")
        second = await stream(engine, "The future of AI is", "stream-2")
        assert first == second
        await engine.check_health()
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
