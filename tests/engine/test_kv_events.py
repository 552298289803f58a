"""KV events: a subscriber that knows only the messages rebuilds what the engine has cached."""

from __future__ import annotations

import socket
from contextlib import contextmanager

import msgspec
import pytest
import zmq
from kvcache.kv_fakes import ONE_GROUP, FakeRequest, layout_of
from kvcache.test_kv_manager import run
from tiny_engine import open_llm, random_prompts

from penstock import SamplingParams
from penstock.config import EngineConfig
from penstock.config.kv_events import KVEventsSettings
from penstock.engine.kv_events import KVEvents
from penstock.kvcache.manager import KVCacheManager
from penstock.protocol.errors import ConfigError

PATIENCE_MS = 120_000
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0)


def decode(batch):
    """A batch as any msgpack library reads it: (events, rank)."""
    time, events, rank = msgspec.msgpack.decode(batch)
    assert time > 1.7e9
    return events, rank


class Index:
    """The cached blocks: the tokens of each, and the block before it."""

    def __init__(self):
        self.blocks = {}

    def apply(self, batch):
        for kind, *fields in decode(batch)[0]:
            if kind == "AllBlocksCleared":
                self.blocks.clear()
            elif kind == "BlockRemoved":
                for block_hash in fields[0]:
                    del self.blocks[block_hash]
            else:
                assert kind == "BlockStored"
                self._store(*fields)

    def _store(self, hashes, parent, token_ids, block_size, lora_id, medium, lora_name):
        assert len(token_ids) == len(hashes) * block_size
        assert (lora_id, medium, lora_name) == (None, "CPU", None)
        for number, block_hash in enumerate(hashes):
            assert block_hash not in self.blocks
            start = number * block_size
            self.blocks[block_hash] = (parent, token_ids[start : start + block_size])
            parent = block_hash

    def prefix(self, block_hash):
        """All tokens up to the end of a block."""
        token_ids = []
        while block_hash is not None:
            block_hash, own = self.blocks[block_hash]
            token_ids = own + token_ids
        return token_ids


@contextmanager
def sockets():
    context = zmq.Context()
    try:
        yield context
    finally:
        context.destroy(linger=0)


def replay(client, first=0):
    """All batches from `first` on, by number."""
    client.send_multipart([b"", first.to_bytes(8, "big")])
    found = {}
    while True:
        assert client.poll(PATIENCE_MS)
        _, number, batch = client.recv_multipart()
        if number == b"\xff" * 8:
            assert batch == b""
            return found
        found[int.from_bytes(number, "big")] = batch


def config_for(folder, **keys):
    return {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{folder}/events",
        "replay_endpoint": f"ipc://{folder}/replay",
        **keys,
    }


def test_a_subscriber_rebuilds_the_index_through_evictions_and_a_reset(tiny_llama, tmp_path):
    options = {"block_size": 8, "num_gpu_blocks_override": 24, "max_model_len": 128}
    with (
        sockets() as context,
        open_llm(tiny_llama, kv_events_config=config_for(tmp_path), **options) as llm,
    ):
        client = context.socket(zmq.DEALER)
        client.connect(f"ipc://{tmp_path}/replay")
        prompts = random_prompts(0, *[64] * 5, 100)
        for prompt in prompts:
            llm.generate([prompt], ONE_TOKEN, use_tqdm=False)
        index = Index()
        batches = replay(client)
        assert list(batches) == list(range(len(batches)))
        assert decode(batches[0]) == ([["AllBlocksCleared"]], 0)
        for batch in batches.values():
            index.apply(batch)
        assert index.blocks.keys() == set(llm.engine.scheduler.kv.cached_hashes())
        longest = max((index.prefix(h) for h in index.blocks), key=len)
        assert longest == prompts[-1]["prompt_token_ids"][:96]
        assert any(event[0] == "BlockRemoved" for b in batches.values() for event in decode(b)[0])
        llm.engine.reset_prefix_cache()
        later = replay(client, len(batches))
        assert list(later) == [len(batches)]
        assert decode(later[len(batches)])[0] == [["AllBlocksCleared"]]


def test_live_messages_have_the_topic_and_the_number_of_the_replay(tiny_llama, tmp_path):
    config = config_for(tmp_path, topic="kv")
    with sockets() as context, open_llm(tiny_llama, kv_events_config=config) as llm:
        subscriber, client = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        subscriber.subscribe(b"kv")
        subscriber.connect(f"ipc://{tmp_path}/events")
        client.connect(f"ipc://{tmp_path}/replay")
        seed = 0
        while not subscriber.poll(50):  # the subscription takes a while to arrive
            llm.generate(random_prompts(seed, 40), ONE_TOKEN, use_tqdm=False)
            seed += 1
        topic, number, batch = subscriber.recv_multipart()
        assert topic == b"kv"
        first = int.from_bytes(number, "big")
        assert replay(client, first)[first] == batch


def test_only_the_last_batches_are_kept(tmp_path):
    settings = KVEventsSettings.parse(config_for(tmp_path, buffer_steps=3))
    with sockets() as context:
        client = context.socket(zmq.DEALER)
        client.connect(f"ipc://{tmp_path}/replay_dp2")
        events = KVEvents(settings, 2, 4, "CPU")
        manager = KVCacheManager(layout_of(ONE_GROUP, 200))
        manager.observe(events)
        for seed in range(1, 9):
            request = FakeRequest(str(seed), [seed] * 9, adapter_name=f"adapter {seed}")
            run(manager, request)
            events.flush()
            events.flush()  # nothing is new
        client.send_multipart([b"", b"short"])  # is ignored
        client.send_multipart([b"malformed"])
        batches = replay(client)
        assert list(batches) == [6, 7, 8]
        ((kind, *fields),), rank = decode(batches[8])
        assert (kind, rank) == ("BlockStored", 2)
        assert fields[1:] == [None, [8] * 8, 4, None, "CPU", "adapter 8"]
        events.close()


def test_a_long_replay_is_complete(tmp_path):
    """ZeroMQ's own limit is 1,000 messages. What is above is dropped without a word."""
    settings = KVEventsSettings.parse(config_for(tmp_path))
    with sockets() as context:
        client = context.socket(zmq.DEALER)
        client.connect(f"ipc://{tmp_path}/replay")
        events = KVEvents(settings, 0, 4, "CPU")
        for _ in range(6000):
            events.on_removed(bytes(500))
            events.flush()
        assert list(replay(client)) == list(range(6001))
        events.close()


def test_blocks_that_others_published_before_split_an_event(tmp_path):
    events = KVEvents(KVEventsSettings.parse(config_for(tmp_path)), 0, 4, "GPU")
    events.on_stored(FakeRequest("r", list(range(40))), [2, 3, 5], lambda number: bytes([number]))
    first, second = events._events
    assert (first.block_hashes, first.parent_block_hash) == ([b"\2", b"\3"], b"\1")
    assert first.token_ids == list(range(8, 16))
    assert (second.block_hashes, second.parent_block_hash) == ([b"\5"], b"\4")
    assert second.token_ids == list(range(20, 24))
    events.close()


def test_an_address_in_use_is_named(tiny_llama):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = {
            "enable_kv_cache_events": True,
            "endpoint": "ipc://*",
            "replay_endpoint": f"tcp://127.0.0.1:{taken.getsockname()[1]}",
        }
        with pytest.raises(ConfigError, match="cannot bind replay_endpoint tcp://127"):
            open_llm(tiny_llama, kv_events_config=config)


def test_events_need_a_prefix_cache(tiny_llama, tmp_path):
    config = config_for(tmp_path)
    with pytest.raises(ConfigError, match="kv_events_config needs a prefix cache"):
        open_llm(tiny_llama, kv_events_config=config, enable_prefix_caching=False)


@pytest.mark.parametrize("config", [{}, {"enable_kv_cache_events": False}, {"publisher": "null"}])
def test_events_are_off_unless_enabled(config):
    options = {"model": "m", "kv_events_config": config}
    assert EngineConfig.from_options(options).kv_events.settings is None


def test_each_rank_has_its_own_address():
    settings = KVEventsSettings.parse({})
    assert settings.at_rank("tcp://*:5557", 0) == "tcp://*:5557"
    assert settings.at_rank("tcp://*:5557", 3) == "tcp://*:5560"
    assert settings.at_rank("tcp://[::1]:5557", 1) == "tcp://[::1]:5558"
    assert settings.at_rank("ipc:///run/kv", 1) == "ipc:///run/kv_dp1"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"endpont": "x"}, "unknown key 'endpont'; did you mean 'endpoint'"),
        ({"publisher": "kafka"}, "publisher must be one of zmq, null, got 'kafka'"),
        ({"endpoint": "5557"}, "endpoint must be tcp://HOST:PORT or ipc://PATH, got '5557'"),
        ({"endpoint": "tcp://*"}, "endpoint must be tcp://HOST:PORT"),
        ({"endpoint": "tcp://*:99999"}, "endpoint must be tcp://HOST:PORT"),
        ({"endpoint": "udp://*:5557"}, "endpoint must be tcp://HOST:PORT"),
        ({"replay_endpoint": "ipc://"}, "replay_endpoint must be tcp://HOST:PORT or ipc://PATH"),
        ({"buffer_steps": -1}, "buffer_steps must be at least 0, got -1"),
        ({"hwm": 0}, "hwm must be at least 1, got 0"),
        ({"enable_kv_cache_events": "yes"}, "enable_kv_cache_events must be bool, got 'yes'"),
    ],
)
def test_bad_settings_are_named(config, message):
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_options({"model": "m", "kv_events_config": config})
    assert str(caught.value).startswith(f"kv_events_config: {message}")
