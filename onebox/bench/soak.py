"""A server under rude clients: many streams at once, some hang up, some send rubbish. Nothing may leak or be wrong.

    python -m onebox.bench.soak --streams 200 --seconds 120 --out results/soak.jsonl

Starts `onebox serve` on the bundled model, asks each prompt once alone, then lets `streams` clients repeat them,
greedily decoded. An answer that is finished must be word for word what it was alone. Clients hang up (`--hang-up`, at
any point, before the first byte too), send invalid bodies (`--invalid`) and come back later when the queue is full.
Pages, slots, file descriptors and resident memory are compared before and after.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from onebox.bench import record, values

QUESTIONS = (
    "What is the capital of France?",
    "Count from one to five.",
    "Name three colours of the rainbow.",
    "What is 12 times 4?",
    "Write one sentence about the sea.",
    "What do bees make?",
    "Say hello in German.",
    "Which month comes after May?",
)
# longer than a page, so that chats share a prefix in the cache
SYSTEM = "You answer questions of visitors to a small museum by the sea. " * 8
LENGTHS = (8, 16, 24)  # tokens an answer
# Each of them must be a 4xx with a message.
RUBBISH: tuple[bytes, ...] = (
    b"",
    b"{",
    b"[]",
    b"\xff\xfe\x00",
    b'{"messages": []}',
    b'{"messages": [{"role": "user"}]}',
    b'{"messages": [{"role": "king", "content": "x"}]}',
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": -1}',
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}',
    b'{"messages": [{"role": "user", "content": "x"}], "model": "none"}',
    b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
    b'{"messages":' + b"[" * 2000,
)


@dataclass(frozen=True)
class Ask:
    """One greedy request of a chat or a completion."""

    chat: bool
    prompt: str
    max_tokens: int

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, *, stream: bool) -> bytes:
        fields: dict[str, Any] = {"max_tokens": self.max_tokens, "temperature": 0, "stream": stream}
        if self.chat:
            user = {"role": "user", "content": self.prompt}
            fields["messages"] = [{"role": "system", "content": SYSTEM}, user]
        else:
            fields["prompt"] = self.prompt
        return json.dumps(fields).encode()


ASKS = tuple(Ask(chat, q, n) for chat in (True, False) for q in QUESTIONS for n in LENGTHS)


@dataclass
class Seen:
    """What the clients saw."""

    counts: Counter[str] = field(default_factory=Counter)
    first_s: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)  # what must not happen, in words


def text_of(choice: dict[str, Any]) -> str:
    part = choice.get("message") or choice.get("delta") or choice
    return "".join(part.get(name) or "" for name in ("reasoning", "content", "text"))


async def exchange(port: int, path: str, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    return reader, writer


async def answer_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if ": " in line)
    return int(head[0].split()[1]), headers


async def body_of(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if headers.get("transfer-encoding") != "chunked":
        return await reader.read()
    parts = []
    while size := int(await reader.readline(), 16):
        parts.append(await reader.readexactly(size))
        await reader.readline()
    return b"".join(parts)


class Client:
    """One client: asks until the time is over. Every draw comes from its own seed."""

    def __init__(self, port: int, truth: dict[Ask, str], seen: Seen, args: argparse.Namespace, seed: int) -> None:
        self.port, self.truth, self.seen, self.args = port, truth, seen, args
        self.random = random.Random(seed)

    async def run(self, until_s: float) -> None:
        while time.perf_counter() < until_s:
            draw = self.random.random()
            try:
                if draw < self.args.invalid:
                    await self.rubbish()
                else:
                    await self.ask(hang_up=draw < self.args.invalid + self.args.hang_up)
            except (OSError, asyncio.IncompleteReadError, ValueError) as e:
                self.seen.faults.append(f"connection: {type(e).__name__}: {e}")
                await asyncio.sleep(0.2)

    async def rubbish(self) -> None:
        path = self.random.choice(("/v1/chat/completions", "/v1/messages", "/v1/responses"))
        reader, writer = await exchange(self.port, path, self.random.choice(RUBBISH))
        status, headers = await answer_head(reader)
        text = (await body_of(reader, headers)).decode()
        writer.close()
        self.seen.counts["invalid"] += 1
        if not 400 <= status < 500 or '"message"' not in text:
            self.seen.faults.append(f"rubbish got {status}: {text[:200]}")

    async def ask(self, *, hang_up: bool) -> None:
        ask, stream = self.random.choice(ASKS), self.random.random() < 0.8
        begun_s = time.perf_counter()
        reader, writer = await exchange(self.port, ask.path, ask.body(stream=stream))
        try:
            if hang_up and self.random.random() < 0.3:  # while it waits or its prompt is read
                await asyncio.sleep(self.random.random() * 2)
                self.seen.counts["hung_up"] += 1
                return
            status, headers = await answer_head(reader)
            if status == 429:
                self.seen.counts["refused_429"] += 1
                if int(headers.get("retry-after", 0)) < 1:
                    self.seen.faults.append("429 without Retry-After")
                await asyncio.sleep(1 + self.random.random())
                return
            if status != 200:
                self.seen.faults.append(f"{status}: {(await body_of(reader, headers))[:200]!r}")
                return
            if stream:
                self.seen.first_s.append(time.perf_counter() - begun_s)
            if hang_up:
                await reader.read(self.random.randrange(1, 4000))
                self.seen.counts["hung_up"] += 1
                return
            data = await body_of(reader, headers)
            self.check(ask, streamed_text(data) if stream else text_of(json.loads(data)["choices"][0]))
        finally:
            writer.transport.abort() if hang_up else writer.close()

    def check(self, ask: Ask, text: str | None) -> None:
        self.seen.counts["finished"] += 1
        if text != self.truth[ask]:
            self.seen.counts["wrong"] += 1
            self.seen.faults.append(f"{ask}: {text!r}, alone {self.truth[ask]!r}")


def streamed_text(data: bytes) -> str | None:
    """The text of a stream, or None when it did not end as one."""
    lines = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: ")]
    if not lines or lines[-1] != b"[DONE]":
        return None
    chunks = [json.loads(line) for line in lines[:-1]]
    if any("error" in chunk for chunk in chunks):
        return None
    return "".join(text_of(choice) for chunk in chunks for choice in chunk["choices"])


def tree(pid: int) -> list[int]:
    """A process and all that it started."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
    found, more = [pid], True
    while more:
        children = [p for p, parent in parents.items() if parent in found and p not in found]
        found += children
        more = bool(children)
    return found


def footprint(pid: int) -> tuple[float, int]:
    """Resident MB and open file descriptors of a process and its children."""
    rss_kb, fds = 0, 0
    for one in tree(pid):
        try:
            status = Path(f"/proc/{one}/status").read_text()
            fds += len(os.listdir(f"/proc/{one}/fd"))
        except OSError:
            continue
        rss_kb += next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")), 0)
    return rss_kb / 1024, fds


async def idle(url: str, timeout_s: float = 60) -> dict[str, Any]:
    """The engine's stats once nothing runs or waits."""
    async with httpx.AsyncClient(timeout=30) as client:
        end_s = time.perf_counter() + timeout_s
        while True:
            stats = (await client.get(f"{url}/v1/onebox/stats")).json()
            if not stats["running"] and not stats["waiting"]:
                return dict(stats)
            if time.perf_counter() > end_s:
                raise TimeoutError(f"still busy after {timeout_s:g} s: {stats}")
            await asyncio.sleep(0.1)


async def alone(port: int) -> dict[Ask, str]:
    """Every answer while nothing else runs."""
    truth = {}
    for ask in ASKS:
        reader, writer = await exchange(port, ask.path, ask.body(stream=False))
        status, headers = await answer_head(reader)
        data = json.loads(await body_of(reader, headers))
        writer.close()
        assert status == 200, data
        truth[ask] = text_of(data["choices"][0])
    return truth


async def soak(pid: int, port: int, args: argparse.Namespace) -> dict[str, Any]:
    url, seen = f"http://127.0.0.1:{port}", Seen()
    truth = await alone(port)
    begun_s = time.perf_counter()
    until_s = begun_s + args.seconds
    clients = [Client(port, truth, seen, args, seed) for seed in range(args.streams)]
    load = asyncio.gather(*(client.run(until_s) for client in clients))
    rss_mb: list[tuple[float, float]] = []
    warm_s = begun_s + args.seconds * 0.3
    before = await idle_before(url)
    while not load.done():
        rss_mb.append((time.perf_counter(), footprint(pid)[0]))
        await asyncio.wait({load}, timeout=1)
    await load
    wall_s = time.perf_counter() - begun_s
    after = await idle(url)
    await asyncio.sleep(0.5)
    rss, fds = footprint(pid)
    warm = [mb for at, mb in rss_mb if at >= warm_s]
    early = statistics.median(warm[: max(1, len(warm) // 4)])
    late = statistics.median(warm[-max(1, len(warm) // 4) :])
    return {
        **{name: seen.counts[name] for name in ("finished", "wrong", "hung_up", "invalid", "refused_429")},
        "faults": len(seen.faults),
        "fault_examples": seen.faults[:5],
        "wall_s": round(wall_s, 1),
        "generated_tok_s": round((after["generated_tokens"] - before["generated_tokens"]) / wall_s, 1),
        "first_byte_s": {"p50": quantile(seen.first_s, 0.5), "p99": quantile(seen.first_s, 0.99)},
        "rss_mb": {"early": round(early, 1), "late": round(late, 1), "idle": round(rss, 1)},
        "rss_growth": round(late / early - 1, 4),
        "fds": {"after": fds},
        "leaked": {
            "pages": after["pages_total"] - after["pages_free"] - after["pages_cached"],
            "slots": after["slots_total"] - after["slots_free"],
        },
        "stats": {k: after[k] for k in ("finished", "cancelled", "preemptions", "steps", "cached_tokens")},
    }


async def idle_before(url: str) -> dict[str, Any]:
    async with httpx.AsyncClient(timeout=60) as client:
        return dict((await client.get(f"{url}/v1/onebox/stats")).json())


def quantile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values) or [0.0]
    return round(ordered[min(int(len(ordered) * q), len(ordered) - 1)], 3)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(args: argparse.Namespace) -> dict[str, Any]:
    port = free_port()
    command = [sys.executable, "-m", "onebox.cli", "serve", "--port", str(port), "--log-level", "warning"]
    command += ["--max-num-seqs", str(args.max_num_seqs), "--max-waiting", str(args.max_waiting)]
    command += ["--max-model-len", "2048"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        end_s = time.perf_counter() + 120
        while True:
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health/ready", timeout=5).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            if server.poll() is not None or time.perf_counter() > end_s:
                raise RuntimeError(f"the server did not start: {server.communicate(timeout=5)[1][-2000:]}")
            time.sleep(0.2)
        fds = footprint(server.pid)[1]
        result = asyncio.run(soak(server.pid, port, args))
        result["fds"]["before"] = fds
    finally:
        server.terminate()
        log = server.communicate(timeout=60)[1]
    result["log_errors"] = sum(" ERROR " in line or line.startswith("Traceback") for line in log.splitlines())
    return result


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = values.parser(__doc__)
    parser.add_argument("--streams", type=values.count, default=200)
    parser.add_argument("--seconds", type=values.positive, default=120)
    parser.add_argument("--hang-up", type=values.share, default=0.2, help="share of requests whose client goes away")
    parser.add_argument("--invalid", type=values.share, default=0.05, help="share of requests that are rubbish")
    parser.add_argument("--max-num-seqs", type=values.count, default=16)
    parser.add_argument(
        "--max-waiting", type=values.count, default=160, help="fewer than streams, so that some are refused"
    )
    parser.add_argument("--out", type=values.output, help="file to append a result line to")
    args = parser.parse_args(argv)
    fields = {k: getattr(args, k) for k in ("streams", "seconds", "max_num_seqs", "max_waiting")}
    shares = {"hang_up_share": args.hang_up, "invalid_share": args.invalid}
    result = {"bench": "soak", "model": "tiny", **fields, **shares, **run(args)}
    print(json.dumps(result))
    if args.out:
        import torch

        record.append(Path(args.out), result | record.environment(torch.device("cpu")))
    return result


if __name__ == "__main__":
    main()
