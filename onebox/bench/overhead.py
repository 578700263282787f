"""What the server adds to an engine: tokens a second that it streams over HTTP from an engine that costs nothing.

    python -m onebox.bench.overhead --streams 32 --tokens-per-step 1 --out results/overhead.jsonl

The engine is the public fake, in the server's process: each stream gets `tokens_per_step` tokens a step, `rate` tokens
a second at most. The client is a process of its own on plain sockets that counts tokens by `usage`, so that it does not
limit what it measures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import time
from collections.abc import Sequence
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from onebox.bench import record, values
from onebox.config import bundled_model
from onebox.server.app import create_app
from onebox.server.chat import Tokenizer
from onebox.server.serve import HttpOptions, listen, uvicorn_server
from onebox.testing import FakeEngine

QUANTILES = (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
TEXT = "The harbour was quiet that morning, and nobody had expected the boats to return before the evening tide. "


def serve(pipe: Connection, args: argparse.Namespace) -> None:
    """A server on a free port; its port goes into the pipe."""
    tokenizer = Tokenizer.from_folder(bundled_model())
    script = (tokenizer.encode(TEXT) * (1 + args.tokens // 16))[: args.tokens]
    eos = tokenizer.rust.token_to_id("<|im_end|>")
    assert eos is not None
    step_s = args.tokens_per_step / args.rate
    engine = FakeEngine(
        script,
        vocab=tokenizer.n_ids,
        eos=eos,
        tokens_per_step=args.tokens_per_step,
        step_s=step_s,
        paced=True,
        max_num_seqs=args.streams,
        max_model_len=2 * args.tokens + 1000,
    )
    app = create_app(engine, tokenizer=tokenizer, served_names=["fake"], reasoning=args.endpoint == "chat")
    sock = listen("127.0.0.1", 0)
    pipe.send(sock.getsockname()[1])
    uvicorn_server(app, HttpOptions(log_level="warning", drain_s=1)).run(sockets=[sock])


async def stream(port: int, path: str, body: bytes) -> tuple[int, int, float, list[float]]:
    """Tokens, events, seconds from the first bytes to the last, and seconds between arrivals of one stream."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**22)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode() + body)
    events, tail, times = 0, b"", []
    while part := await reader.read(2**18):
        times.append(time.perf_counter())
        events += part.count(b"data: ")
        tail = (tail + part)[-4096:]
    writer.close()
    assert b"data: [DONE]" in tail, tail[-300:]
    usage = next(line for line in reversed(tail.split(b"\n")) if b'"completion_tokens"' in line)
    tokens = json.loads(usage.removeprefix(b"data: "))["usage"]["completion_tokens"]
    return tokens, events, times[-1] - times[0], [b - a for a, b in pairwise(times)]


async def load(port: int, args: argparse.Namespace) -> dict[str, Any]:
    path = "/v1/chat/completions" if args.endpoint == "chat" else "/v1/completions"
    prompt: dict[str, Any] = (
        {"messages": [{"role": "user", "content": "Hi"}]} if args.endpoint == "chat" else {"prompt": "Hi"}
    )
    options = {"stream": True, "max_tokens": args.tokens, "stream_options": {"include_usage": True}}
    body = json.dumps({**prompt, **options}).encode()
    await stream(port, path, json.dumps({**prompt, **options, "max_tokens": 50}).encode())  # imports and caches
    begun_s = time.perf_counter()
    done = await asyncio.gather(*(stream(port, path, body) for _ in range(args.streams)))
    wall_s = time.perf_counter() - begun_s
    tokens, events = sum(d[0] for d in done), sum(d[1] for d in done)
    assert all(d[0] == args.tokens for d in done), "a stream lost tokens"
    gaps_ms = sorted(1000 * gap for d in done for gap in d[3])
    return {
        "tokens": tokens,
        "events": events,
        "wall_s": round(wall_s, 3),
        "tok_s": round(tokens / wall_s),
        "events_s": round(events / wall_s),
        "slowest_stream_tok_s": round(min(d[0] / d[2] for d in done)),
        "load_average": round(os.getloadavg()[0], 1),  # of the machine, others included
        "gap_ms": {p: round(gaps_ms[min(int(len(gaps_ms) * q), len(gaps_ms) - 1)], 1) for p, q in QUANTILES},
    }


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = values.parser(__doc__)
    parser.add_argument("--streams", type=values.count, default=32)
    parser.add_argument("--tokens", type=values.count, default=4000, help="tokens a stream")
    parser.add_argument("--tokens-per-step", type=values.count, default=1)
    parser.add_argument(
        "--rate", type=values.positive, default=5000, help="tokens a second that the engine would give a stream"
    )
    parser.add_argument("--endpoint", choices=("chat", "completions"), default="chat")
    parser.add_argument("--out", type=values.output, help="file to append a result line to")
    args = parser.parse_args(argv)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=serve, args=(there, args), daemon=True)
    server.start()
    try:
        port = here.recv()
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        result = asyncio.run(load(port, args))
    finally:
        server.terminate()
        server.join(10)
    fields = {k: getattr(args, k) for k in ("streams", "tokens_per_step", "rate", "endpoint")}
    result = {"bench": "http_overhead", **fields, **result}
    print(json.dumps(result))
    if args.out:
        import torch

        record.append(Path(args.out), result | record.environment(torch.device("cpu")))
    return result


if __name__ == "__main__":
    main()
