"""Greedy decoding through the engine: tokens a second with the host's work, beside the captured step alone.

python -m onebox.bench.engine --model onebox/models/tiny --batch 1 8 --k 0 3
python -m onebox.bench.engine --shape qwen3.5-35b-a3b --batch 1 --k 0 2    # random weights, forced acceptance
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch

from onebox.bench import values
from onebox.bench.random_model import random_model_weights
from onebox.bench.record import append, environment, rounded, time_cuda
from onebox.checkpoint.reader import LoadReport
from onebox.config import KV_CACHE_DTYPES, EngineConfig
from onebox.engine.engine import Engine
from onebox.ledger import BUILDS, SHAPES
from onebox.model.load import Loaded
from onebox.model.qwen3_5 import Qwen35
from onebox.request import Request, SamplingParams

STEPS = 96


def random_engine(
    model: Qwen35,
    shape: str,
    k: int,
    batch: int,
    context: int,
    forced: tuple[float, ...],
    kv_gb: float = 8.0,
    kv: str = "auto",
) -> Engine:
    """An engine over random weights of a shape; with drafts, `forced` says how many are kept.

    On a CPU the captured step runs as it stands, in the model's type.
    """
    report = LoadReport(Path(shape), 0, {}, mtp=True, vision_tensors=0, activation_scales=0, side_files=())
    config = EngineConfig(
        model=shape, device=model.device.type, dtype=str(model.dtype).removeprefix("torch."), draft_len=k,
        max_num_seqs=batch, kv_gb=kv_gb, max_model_len=context, snapshots=4, cuda_graphs=True, kv_cache_dtype=kv,
    )  # fmt: skip
    engine = Engine(config, Loaded(model, report))
    assert engine.captured is not None
    engine.captured.forced = forced[:k]
    return engine


def decode(engine: Engine, batch: int, prompt: int, steps: int = STEPS) -> tuple[float, float, float]:
    """Milliseconds a step (median), tokens a step and request, milliseconds until all have their first."""
    vocab, rng = engine.info.vocab, random.Random(batch)

    def synchronize() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    params = SamplingParams(max_tokens=4 * steps, temperature=0.0, ignore_eos=True)
    for i in range(batch):
        engine.add(Request(f"r{i}", tuple(rng.randrange(vocab) for _ in range(prompt)), params))
    times, tokens = [], 0
    start = time.perf_counter()
    begun: set[str] = set()
    while len(begun) < batch:
        begun |= {o.request_id for o in engine.step() if o.tokens}
    synchronize()
    first = time.perf_counter() - start
    for i in range(steps):
        start = time.perf_counter()
        outputs = engine.step()
        synchronize()
        if i >= steps // 3:
            times.append(time.perf_counter() - start)
            tokens += sum(len(o.tokens) for o in outputs)
    for i in range(batch):
        engine.cancel(f"r{i}")
    return statistics.median(times) * 1e3, tokens / len(times) / batch, first * 1e3


def graph_ms(engine: Engine, batch: int) -> float:
    """Device time of the captured step alone, as the last real one left its inputs; 0 without one."""
    if engine.captured is None:
        return 0.0
    graph = engine.captured.graph(batch).graph
    assert graph is not None
    return time_cuda(graph.replay).median_ms


def main() -> None:
    parser = values.parser(__doc__)
    parser.add_argument("--model", type=values.folder)
    parser.add_argument("--shape", choices=sorted(n for n, s in SHAPES.items() if s.moe))
    parser.add_argument("--build", choices=sorted(BUILDS), default="hybrid")
    parser.add_argument("--batch", type=values.count, nargs="+", default=[1])
    parser.add_argument("--k", type=values.drafts, nargs="+", default=[0])
    parser.add_argument(
        "--force-acceptance", type=values.share, nargs="+", default=[0.9, 0.8, 0.7], help="random weights only"
    )
    parser.add_argument("--draft-vocab", type=values.count, help="drafts come from the first so many tokens")
    parser.add_argument("--mtp-format", choices=("bf16", "fp8", "int4"), help="another format for the drafter's block")
    parser.add_argument(
        "--layers", type=values.count, help="only the first layers: for a quick look, never for a claim"
    )
    parser.add_argument("--prompt", type=values.count, default=128)
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto")
    parser.add_argument("--kv-gb", type=values.positive, default=8.0, help="for pages, with random weights")
    parser.add_argument("--commit", help="the commit, where the checkout is not at hand")
    parser.add_argument("--out", type=values.output, default=Path("results/engine.jsonl"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device is visible; this benchmark measures one")
    if (args.model is None) == (args.shape is None):
        parser.error("name one of --model and --shape")
    random_model = None
    if args.shape:
        spec, build = SHAPES[args.shape], BUILDS[args.build]
        spec = replace(spec, layer_types=spec.layer_types[: args.layers])
        if args.mtp_format:
            build = replace(build, mtp_experts=args.mtp_format, mtp_dense=args.mtp_format)
        random_model = random_model_weights(spec, build, torch.device("cuda", 0))
        if args.draft_vocab:
            random_model = replace(random_model, draft_vocab=args.draft_vocab)
    for k in args.k:
        forced: tuple[float, ...] = ()
        if random_model is None:
            engine = Engine(
                EngineConfig(
                    model=str(args.model),
                    device="cuda",
                    draft_len=k,
                    kv_gb=1.0,
                    max_num_seqs=max(args.batch),
                    kv_cache_dtype=args.kv_cache_dtype,
                )
            )
        else:
            forced = tuple(args.force_acceptance[:k]) + (args.force_acceptance[-1],) * (k - len(args.force_acceptance))
            engine = random_engine(
                random_model, args.shape, k, max(args.batch), args.prompt + 4096, forced, args.kv_gb,
                args.kv_cache_dtype,
            )  # fmt: skip
        with torch.inference_mode():
            for batch in args.batch:
                ms, per_step, prefill = decode(engine, batch, args.prompt)
                record = {
                    "bench": "engine",
                    "model": args.model.name if args.model else args.shape,
                    "weights": "checkpoint" if args.model else "random",
                    "fused": engine.runner.model.fused is not None,
                    "captured": engine.captured is not None,
                    "graph_ms": rounded(graph_ms(engine, batch)),
                    "build": args.build if args.shape else "checkpoint",
                    "kv": engine.plan.kv_format,
                    "batch": batch,
                    "k": k,
                    "forced_acceptance": list(forced),
                    "draft_vocab": args.draft_vocab,
                    "mtp_format": args.mtp_format or "build's",
                    "prompt": args.prompt,
                    "ms_per_step": rounded(ms),
                    "tokens_per_step": rounded(per_step),
                    "tok_s": rounded(batch * per_step / ms * 1e3),
                    "prefill_ms": rounded(prefill),
                }
                print(record, flush=True)
                if args.layers is None:
                    append(args.out, record | environment(torch.device("cuda", 0), args.commit))


if __name__ == "__main__":
    main()
