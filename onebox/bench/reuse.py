"""Time to the first token of a prompt, cold and again: what the prefix cache saves.

python -m onebox.bench.reuse --model onebox/models/tiny --tokens 500 1000 2000 4000
"""

from __future__ import annotations

import random
import statistics
import time
from pathlib import Path

import torch

from onebox.bench import values
from onebox.bench.record import append, environment, rounded
from onebox.config import EngineConfig
from onebox.engine.engine import Engine
from onebox.request import Request, SamplingParams


def first_token_times(engine: Engine, n_tokens: int, repeats: int, seed: int = 0) -> tuple[float, float, bool]:
    """Median seconds to the first token of fresh prompts and of the same ones again; whether both said the same."""
    rng = random.Random(seed)
    times: tuple[list[float], list[float]] = ([], [])
    same = True
    for i in range(repeats):
        prompt = tuple(rng.randrange(3, engine.info.vocab - 200) for _ in range(n_tokens))
        said = []
        for again in (0, 1):
            engine.add(Request(f"{i}-{again}", prompt, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)))
            start, tokens = time.perf_counter(), list[int]()
            while engine.has_work:
                tokens += [t for output in engine.step() for t in output.tokens]
            times[again].append(time.perf_counter() - start)
            said.append(tokens)
        same &= said[0] == said[1]
    return statistics.median(times[0]), statistics.median(times[1]), same


def main() -> None:
    parser = values.parser(__doc__)
    parser.add_argument("--model", type=values.folder, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tokens", type=values.count, nargs="+", default=[4000])
    parser.add_argument("--repeats", type=values.count, default=3)
    parser.add_argument("--commit", help="the commit, where the checkout is not at hand")
    parser.add_argument("--out", type=values.output, default=Path("results/engine.jsonl"))
    args = parser.parse_args()
    engine = Engine(EngineConfig(model=str(args.model), device=args.device))
    if (longest := max(args.tokens)) >= engine.max_model_len:
        parser.error(f"--tokens {longest}: {args.model.name} reads {engine.max_model_len} tokens with the answer")
    for n in args.tokens:
        cold_s, warm_s, same = first_token_times(engine, n, args.repeats, seed=n)
        record = {
            "bench": "reuse",
            "model": args.model.name,
            "prompt": n,
            "repeats": args.repeats,
            "cold_ttft_ms": rounded(cold_s * 1e3),
            "warm_ttft_ms": rounded(warm_s * 1e3),
            "share": rounded(warm_s / cold_s, 3),
            "same_token": same,
        }
        print(record, flush=True)
        append(args.out, record | environment(torch.device(engine.config.device), args.commit))


if __name__ == "__main__":
    main()
