"""Throughput of the client of `penstock bench serve` on one core.

A server in a separate process streams tokens to all connections as fast as they are read. The
script prints the client's token rate and its CPU time per token. The client does not limit a
measurement as long as this CPU time, times the token rate of the real server, is well below one.

    python benchmarks/client_overhead.py --streams 256 --tokens 200
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from multiprocessing.connection import Connection

from penstock.cli.bench.http import Address, HttpClient
from penstock.cli.bench.load import Load, run_load
from penstock.cli.bench.prompts import BenchRequest
from penstock.cli.bench.streams import Dialect
from penstock.cli.serve import run_in_event_loop

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNK = {
    "id": "cmpl-0123456789abcdef0123456789abcdef",
    "object": "text_completion",
    "created": 1700000000,
    "model": "some-model",
    "choices": [{"index": 0, "text": " token", "logprobs": None, "finish_reason": None}],
}


def event(data: str) -> bytes:
    content = f"data: {data}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(content), content)


def serve(pipe: Connection, num_tokens: int) -> None:
    piece = event(json.dumps(CHUNK))
    CHUNK["choices"][0]["finish_reason"] = "length"  # type: ignore[index]
    last = event(json.dumps(CHUNK)) + event("[DONE]") + b"0\r\n\r\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD)
        for _ in range(num_tokens - 1):
            writer.write(piece)  # a packet for each token, as a real server sends them
            await writer.drain()
            await asyncio.sleep(0)
        writer.write(last)
        await writer.drain()

    async def main() -> int:
        server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=4096)
        pipe.send(server.sockets[0].getsockname()[1])
        await asyncio.Event().wait()
        return 0

    run_in_event_loop(main())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    args = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.Process(target=serve, args=(theirs, args.tokens), daemon=True)
    server.start()
    port = ours.recv()

    async def measure() -> int:
        client = HttpClient(Address.parse(f"http://127.0.0.1:{port}"))
        requests = [BenchRequest([1], args.tokens)] * args.streams
        cpu, start = time.process_time(), time.perf_counter()
        dialect = Dialect("openai", "some-model")
        result = await run_load(client, dialect, requests, [0.0] * args.streams, Load())
        cpu, elapsed = time.process_time() - cpu, time.perf_counter() - start
        assert all(record.error is None for record in result.records)
        num_tokens = sum(record.num_output_tokens for record in result.records)
        assert num_tokens == args.streams * args.tokens
        print(
            f"{args.streams} streams at once, {num_tokens} tokens in {elapsed:.2f} s: "
            f"{num_tokens / elapsed:.0f} tokens/s, {cpu / num_tokens * 1e6:.1f} us of CPU a token"
        )
        return 0

    run_in_event_loop(measure())
    server.kill()


if __name__ == "__main__":
    main()
