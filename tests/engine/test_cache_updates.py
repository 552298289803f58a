"""An engine reports what it caches to those who ask, by hashes that they can compute."""

from __future__ import annotations

from contextlib import closing

import zmq
from tiny_engine import open_llm, random_prompts

from penstock import SamplingParams
from penstock.engine import messages
from penstock.engine.black_box import BlackBox
from penstock.engine.process import EngineServer, core_info
from penstock.kvcache.landmarks import landmarks, split_keys
from penstock.protocol.request import EngineRequest

ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0)


def make_request(request_id, prompt):
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt["prompt_token_ids"],
        params=ONE_TOKEN,
        seed=0,
    )


def keys_of(core, *prompts):
    keys = core_info(core).prefix_keys
    return {key for prompt in prompts for _, key in landmarks(keys, make_request("r", prompt))}


def test_an_engine_reports_nothing_until_it_is_asked_and_then_all(tiny_llama):
    prompts = random_prompts(0, 100, 40, 70)
    with open_llm(tiny_llama, block_size=8) as llm:
        core = llm.engine
        llm.generate(prompts[:1], ONE_TOKEN, use_tqdm=False)
        assert core.take_cache_update() is None
        core.report_cache()
        core.report_cache()  # the second time changes nothing
        update = core.take_cache_update()
        assert set(split_keys(update.stored)) == keys_of(core, prompts[0])
        llm.generate(prompts[1:], ONE_TOKEN, use_tqdm=False)
        update = core.take_cache_update()
        assert set(split_keys(update.stored)) == keys_of(core, *prompts[1:])
        core.reset_prefix_cache()
        assert core.take_cache_update().cleared


def test_an_engine_that_evicts_reports_that(tiny_llama):
    prompts = random_prompts(0, *[64] * 6)
    with open_llm(tiny_llama, block_size=8, num_gpu_blocks_override=20, max_model_len=96) as llm:
        llm.engine.report_cache()
        known: set[bytes] = set()
        for prompt in prompts:
            llm.generate([prompt], ONE_TOKEN, use_tqdm=False)
            update = llm.engine.take_cache_update()
            known = known - set(split_keys(update.removed)) | set(split_keys(update.stored))
        assert known == {h[:8] for h in llm.engine.scheduler.kv.cached_hashes()}
        assert keys_of(llm.engine, prompts[-1]) <= known
        assert not keys_of(llm.engine, prompts[0]) & known


def test_updates_come_with_the_outputs_of_the_engine_process(tiny_llama):
    prompt = random_prompts(0, 100)[0]
    context = zmq.Context()
    client, server = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    try:
        server.bind("inproc://engine")
        client.connect("inproc://engine")
        with open_llm(tiny_llama, block_size=8) as llm, closing(BlackBox.create()) as box:
            server_loop = EngineServer(server, llm.engine, box)
            client.send_multipart([messages.CALL, b"0", b"report_cache"])
            body = messages.encode(make_request("r", prompt))
            client.send_multipart([messages.ADD, b"r", body])
            client.send_multipart([messages.CLOSE])
            server_loop.serve()
            while llm.engine.has_work():
                server_loop._step()
            server_loop._send()
            expected = keys_of(llm.engine, prompt)
        known: set[bytes] = set()
        while client.poll(0):
            outputs = messages.decode_message(client.recv())
            if outputs.cache is not None:
                known |= set(split_keys(outputs.cache.stored))
        assert known == expected
    finally:
        context.destroy(linger=0)
