"""Decode steps of a published shape with random weights, as one CUDA graph, against the byte ledger.

python -m onebox.bench.decode --shape qwen3.5-122b-a10b --build hybrid --batch 1 --context 512
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from onebox.bench import values
from onebox.bench.kernels import kernel_table, print_table
from onebox.bench.random_model import RandomModel, Rows, check, pages_each
from onebox.bench.record import append, capture, copy_bandwidth, environment, rounded, time_cuda
from onebox.kernels import configs
from onebox.kernels.turboquant_ref import FORMATS
from onebox.ledger import BUILDS, SHAPES, step_bytes

STEPS = 200


def measure(
    model: RandomModel, shape: str, build: str, batch: int, context: int, copy_bytes_s: float
) -> dict[str, Any]:
    """Milliseconds of a captured step, with the ledger's bytes for the experts the run met."""
    device = model.embedding.device
    rows = Rows.make(batch, 1, context, pages_each(context), model.spec.vocab, device)
    graph = capture(lambda: model.step(rows))
    counts: list[torch.Tensor] = []
    met = []
    for _ in range(4):
        counts.clear()
        model.forward(rows, 1, counts)
        met.append(torch.stack(counts).float().mean() - 1)
        graph.replay()
    distinct = float(torch.stack(met).mean())
    timing = time_cuda(graph.replay, repeats=STEPS, warmup=20)
    moved = step_bytes(model.spec, model.build, batch=batch, context=context, distinct=distinct).total
    seconds = timing.median_ms * 1e-3
    finite = bool(torch.isfinite(model.forward(rows, 1).float()).all())
    if not finite:
        raise SystemExit("decode: hidden states are not finite; the figures would mean nothing")
    return {
        "bench": "decode",
        "shape": shape,
        "weights": "random",
        "build": build,
        "kv": model.build.kv,
        "batch": batch,
        "context": context,
        "k": 0,
        "ms_per_step": rounded(timing.median_ms),
        "ms_low": rounded(timing.low_ms),
        "ms_high": rounded(timing.high_ms),
        "repeats": timing.repeats,
        "tok_s": rounded(batch / seconds),
        "bytes_per_step": int(moved),
        "copy_tb_s": rounded(copy_bytes_s / 1e12),
        "roof_share": rounded(moved / copy_bytes_s / seconds, 3),
        "distinct_experts": rounded(distinct),
        "pdl": configs.pdl(device),
    }


def main() -> None:
    parser = values.parser(__doc__)
    parser.add_argument("--shape", choices=sorted(n for n, s in SHAPES.items() if s.moe), default="qwen3.5-122b-a10b")
    parser.add_argument("--build", choices=sorted(BUILDS), default="hybrid")
    parser.add_argument("--kv-cache-dtype", choices=("bf16", *FORMATS), default="bf16", help="format of KV pages")
    parser.add_argument("--batch", type=values.count, nargs="+", default=[1])
    parser.add_argument("--context", type=values.count, nargs="+", default=[512])
    parser.add_argument(
        "--layers", type=values.count, help="only the first layers: for a quick look, never for a claim"
    )
    parser.add_argument("--table", action="store_true", help="time every kernel alone against its own bytes")
    parser.add_argument("--configs", type=values.file, help="another launch table than the package's")
    parser.add_argument("--pdl", type=int, choices=(0, 1, 2), help="programmatic dependent launch: off, early, late")
    parser.add_argument("--no-check", action="store_true", help="skip the comparison with the references")
    parser.add_argument("--commit", help="the commit, where the checkout is not at hand")
    parser.add_argument("--out", type=values.output, default=Path("results/decode.jsonl"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device is visible; this benchmark measures one")
    device = torch.device("cuda", 0)
    spec, build = SHAPES[args.shape], replace(BUILDS[args.build], kv=args.kv_cache_dtype)
    if args.configs:
        configs.TABLE.update(configs.load(args.configs))
    if args.pdl is not None:
        configs.set_pdl(args.pdl)
    if not args.no_check:
        errors = check(spec, build, device)
        print("relative RMS against the references:", {k: f"{v:.1e}" for k, v in errors.items()}, flush=True)
        if not max(errors.values()) <= 3e-2:
            sys.exit("decode: the kernels differ from their references; nothing was timed")
        torch.cuda.empty_cache()
    copy = copy_bandwidth(device)
    print(f"copy {copy / 1e12:.2f} TB/s", flush=True)
    model = RandomModel.make(
        spec, build, batch=max(args.batch), context=max(args.context), window=1, device=device, n_layers=args.layers
    )
    for batch in args.batch:
        for context in args.context:
            record = measure(model, args.shape, args.build, batch, context, copy) | environment(device, args.commit)
            print(
                {k: record[k] for k in ("batch", "context", "ms_per_step", "tok_s", "roof_share", "distinct_experts")}
            )
            if args.layers is None:
                append(args.out, record)
    if args.table:
        table = kernel_table(model, args.batch[0], args.context[0], copy)
        print_table(table)
        for line in table:
            append(args.out, line | {"shape": args.shape, "build": args.build} | environment(device, args.commit))


if __name__ == "__main__":
    main()
