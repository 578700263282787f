"""Each decode kernel alone, against its own bytes: chained over a model's layers, so that nothing stays in L2.

python -m onebox.bench.kernels --shape qwen3.5-122b-a10b --build hybrid --tune gate_up down
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from onebox.bench import values
from onebox.bench.random_model import RandomModel, Rows, pages_each
from onebox.bench.record import append, capture, copy_bandwidth, environment, rounded, time_cuda
from onebox.kernels import configs, experts, gated_delta, head, linear, moe, paged_attention
from onebox.kernels.moe_ref import Chosen
from onebox.kernels.weights import nbytes
from onebox.ledger import BUILDS, SHAPES, kv_bytes_per_token


@dataclass(frozen=True)
class Piece:
    """One kind of kernel: the calls of all layers, and the bytes one call must move."""

    name: str
    config: str
    calls: tuple[Callable[[], object], ...]
    n_bytes: float


def pieces(model: RandomModel, batch: int, context: int) -> list[Piece]:
    """The kernels of a decode step on inputs that a real step gave them."""
    spec, work, eps = model.spec, model.workspace, model.spec.norm_eps
    rows = Rows.make(batch, 1, context, pages_each(context), spec.vocab, model.embedding.device)
    angle = rows.positions.float()[:, None, None] * model.inv_freq
    rope = angle.cos().bfloat16(), angle.sin().bfloat16()
    h = linear.embed(rows.tokens, model.embedding, model.layers[0].mixer_norm)
    gdn = [layer for layer in model.layers if layer.window is not None]
    attention = [layer for layer in model.layers if layer.head_norms is not None]
    first = model.layers[0]
    pairs = linear.wants_pairs(first.down), linear.wants_pairs(first.shared_down)
    by_row = experts.takes(first.gate_up, first.down)
    routers = [(h, x.router, x.shared_gate, x.shared_gate_up, spec.top_k, eps, work, pairs[1]) for x in model.layers]
    route = moe.choose if by_row else moe.route
    routings = [route(*r)[0] for r in routers]
    slots = sum(float(r.count) for r in routings) / len(routings)
    hidden = linear.normalize(h, eps)
    hidden_row = route(*routers[0])[1]
    one = 1 / spec.n_experts
    out: list[Piece] = []

    def add(name: str, config: str, calls: list[Callable[[], object]], n_bytes: float) -> None:
        out.append(Piece(name, config, tuple(calls), n_bytes))

    layers = list(zip(model.layers, routings, strict=True))
    if gdn:
        mixed = linear.project(h, gdn[0].project, None, eps)
        squares = torch.rand(spec.gdn_v_heads, 4, batch, device=h.x.device) + 0.1
        y = torch.randn(batch, spec.gdn_value_width, device=h.x.device).bfloat16()
        where = rows.query_start, rows.state_slot, rows.commit, rows.context_len
        windows = [(x.window, s) for x, s in zip(gdn, model.states, strict=False) if x.window is not None]
        state_bytes = batch * spec.gdn_v_heads * spec.gdn_k_dim * spec.gdn_v_dim * 8
        add(
            "gdn project",
            "linear",
            [partial(linear.project, h, x.project, None, eps) for x in gdn],
            nbytes(gdn[0].project),
        )
        add(
            "gdn window",
            "gated_delta",
            [partial(gated_delta.window, mixed, w, s, *where) for w, s in windows],
            state_bytes,
        )
        add(
            "gdn out",
            "linear_add",
            [
                partial(linear.project_add, y, x.out, h, x.mlp_norm, work, squares, eps, linear.wants_pairs(x.out))
                for x in gdn
            ],
            nbytes(gdn[0].out),
        )
    if attention:
        qkv = linear.project(h, attention[0].project, None, eps)
        a = torch.randn(batch, spec.n_heads * spec.head_dim, device=h.x.device).bfloat16()
        where = rows.page_table, rows.kv_slot, rows.positions, rows.query_start
        norms = [(x.head_norms, p) for x, p in zip(attention, model.pages, strict=False) if x.head_norms is not None]
        kv_bytes = batch * context * kv_bytes_per_token(spec, model.build, mtp=False) / spec.n_attention_layers
        add(
            "attention project",
            "linear",
            [partial(linear.project, h, x.project, None, eps) for x in attention],
            nbytes(attention[0].project),
        )
        attend = paged_attention.gated_attention
        add(
            "attention",
            "attention" if isinstance(model.pages[0], torch.Tensor) else "attention_coded",
            [partial(attend, qkv, *n, rope, p, *where, 1, spec.n_heads, eps, work) for n, p in norms],
            kv_bytes,
        )
        add(
            "attention out",
            "linear_add",
            [
                partial(linear.project_add, a, x.out, h, x.mlp_norm, work, paired=linear.wants_pairs(x.out))
                for x in attention
            ],
            nbytes(attention[0].out),
        )
    add(
        "route",
        "route",
        [partial(route, *r) for r in routers],
        nbytes(first.router) + nbytes(first.shared_gate_up),
    )
    up_bytes = nbytes(first.gate_up) * one * (slots - 1) + nbytes(first.shared_down)
    down_bytes = nbytes(first.down) * one * (slots - 1)
    ups: list[Callable[[], object]] = []
    downs: list[Callable[[], object]] = []
    for x, r in layers:
        if isinstance(r, Chosen):
            z = experts.gate_up(h, r, x.gate_up, hidden_row, x.shared_down, eps, pairs[1])
            ups.append(partial(experts.gate_up, h, r, x.gate_up, hidden_row, x.shared_down, eps, pairs[1]))
            downs.append(partial(experts.down, *z, r, x.down, h, x.mlp_norm, work))
        else:
            y, added = moe.gate_up(h, r, x.gate_up, hidden_row, x.shared_down, eps, pairs)
            ups.append(partial(moe.gate_up, h, r, x.gate_up, hidden_row, x.shared_down, eps, pairs))
            downs.append(partial(moe.down, y, added, r, x.down, h, x.mlp_norm, work, pairs[0]))
    add("gate_up", "row_gate_up" if by_row else "gate_up", ups, up_bytes)
    add("down", "row_down" if by_row else "down", downs, down_bytes)
    add("head", "head", [partial(head.head, hidden, model.head, work, with_logits=False)] * 2, nbytes(model.head))
    add(
        "ends",
        "head",
        [lambda: linear.normalize(linear.embed(rows.tokens, model.embedding, first.mixer_norm), eps)],
        0.0,
    )
    return out


def time_piece(piece: Piece) -> float:
    """Microseconds a call, edges included."""

    def run() -> None:
        for call in piece.calls:
            call()

    graph = capture(run)
    return time_cuda(graph.replay, repeats=15).median_ms * 1e3 / len(piece.calls)


def kernel_table(model: RandomModel, batch: int, context: int, copy_bytes_s: float) -> list[dict[str, Any]]:
    lines = []
    for piece in pieces(model, batch, context):
        us, floor = time_piece(piece), piece.n_bytes / copy_bytes_s * 1e6
        calls = len(piece.calls) if piece.name != "head" else 1
        lines.append({
            "bench": "kernel", "kernel": piece.name, "weights": "random", "batch": batch, "context": context,
            "us": rounded(us), "floor_us": rounded(floor), "share": rounded(floor / us, 3), "calls": calls,
            "us_a_step": rounded(us * calls), "config": asdict(configs.config(piece.config, model.embedding.device,
            model.spec.hidden)),
        })  # fmt: skip
    return lines


def print_table(lines: list[dict[str, Any]]) -> None:
    print(f"{'kernel':18s} {'us':>8s} {'floor':>7s} {'share':>6s} {'calls':>5s} {'us a step':>9s}")
    for x in lines:
        figures = f"{x['us']:8.2f} {x['floor_us']:7.2f} {x['share']:6.2f} {x['calls']:5d} {x['us_a_step']:9.1f}"
        print(f"{x['kernel']:18s} {figures}")
    print(f"{'sum':18s} {'':30s} {sum(x['us_a_step'] for x in lines):9.1f}", flush=True)


CHOICES: dict[str, dict[str, tuple[int | bool, ...]]] = {
    "linear": {"block_n": (32, 64), "warps": (2, 4), "stages": (2, 3, 4), "unroll": (2, 4, 8)},
    "linear_add": {"warps": (4, 8), "stages": (2, 3, 4), "unroll": (1, 2, 4), "programs": (2, 3, 6)},
    "gate_up": {"block_n": (32, 64), "warps": (2, 4), "stages": (2, 3, 4), "unroll": (2, 4, 8)},
    "down": {"warps": (4, 8), "stages": (2, 3, 4), "unroll": (1, 2, 4)},
    "row_gate_up": {"warps": (4, 8, 16), "registers": (0, 128)},
    "row_down": {"block_n": (16, 32, 64), "warps": (4, 8)},
    "route": {"warps": (1, 2), "programs": (1, 2, 4), "stages": (2, 3, 4)},
    "shared": {"block_n": (32,), "unroll": (1, 2, 4), "programs": (2, 4, 8)},
    "head": {"block_n": (64, 128), "warps": (4, 8), "stages": (3, 4), "unroll": (1, 2)},
    "gated_delta": {"block_n": (16, 32, 64, 128), "warps": (2, 4, 8, 16)},
    "attention": {"warps": (4, 8), "stages": (1, 2)},
    "attention_coded": {"warps": (4, 8), "stages": (1, 2)},
}
WIDTHLESS = ("gated_delta", "attention", "attention_coded")  # kernels whose configuration is for any model
USERS = {"shared": ("route", "gate_up")}  # kernels that a configuration beside their own shapes


def candidates(kernel: str) -> list[dict[str, int | bool]]:
    choices = CHOICES[kernel]
    every = [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]
    if kernel in ("gated_delta", "linear_add", "down", "shared", "row_gate_up", "row_down"):
        return every
    return [c for c in every if c.get("block_n", 64) >= 16 * c.get("warps", 4)]


def compile_candidates(shape: str, build: str, kernels: list[str], share: tuple[int, int], batch: int) -> None:
    """Run every `share[1]`-th candidate once on one layer of each kind: fills Triton's cache, one process a share."""
    device = torch.device("cuda", 0)
    model = tiny(shape, build, batch, device)
    jobs = [(k, c) for k in kernels for c in candidates(k)]
    for kernel, changes in jobs[share[0] :: share[1]]:
        width = 0 if kernel in WIDTHLESS else model.spec.hidden
        base = configs.config(kernel, device, width)
        configs.override(device, kernel, width, **changes)
        for piece in pieces(model, batch, 512):
            if piece.config in USERS.get(kernel, (kernel,)):
                try:
                    piece.calls[0]()
                except Exception as error:
                    print(f"{kernel} {changes}: {type(error).__name__}", flush=True)
        torch.cuda.synchronize()
        configs.override(device, kernel, width, **asdict(base))


def tiny(shape: str, build: str, batch: int, device: torch.device) -> RandomModel:
    """Four layers of a shape with few experts' worth of memory: same kernels, less to make."""
    return RandomModel.make(
        SHAPES[shape], BUILDS[build], batch=batch, context=512, window=1, device=device, n_layers=4, experts=32
    )


def tune(model: RandomModel, kernels: list[str], batch: int, context: int, copy_bytes_s: float) -> list[dict[str, Any]]:
    """Time every candidate of each kernel; the best stays in the process's table."""
    device, lines = model.embedding.device, []
    for kernel in kernels:
        width = 0 if kernel in WIDTHLESS else model.spec.hidden
        base, results = configs.config(kernel, device, width), []
        for changes in candidates(kernel):
            configs.override(device, kernel, width, **changes)
            try:
                us = {
                    p.name: time_piece(p)
                    for p in pieces(model, batch, context)
                    if p.config in USERS.get(kernel, (kernel,)) and p.n_bytes
                }
            except Exception as error:
                print(f"{kernel} {changes}: {type(error).__name__}: {str(error)[:80]}", flush=True)
                continue
            results.append((sum(us.values()), changes, us))
        results.sort(key=lambda r: r[0])
        for total, changes, us in results[:4] + results[-1:]:
            print(f"{kernel:12s} {total:8.2f} us {changes} { {k: round(v, 2) for k, v in us.items()} }", flush=True)
        configs.override(device, kernel, width, **(asdict(base) | (results[0][1] if results else {})))
        lines += [
            {"bench": "tune", "kernel": kernel, "us": rounded(t), "choice": c, "batch": batch} for t, c, _ in results
        ]
    return lines


def main() -> None:
    parser = values.parser(__doc__)
    parser.add_argument("--shape", choices=sorted(n for n, s in SHAPES.items() if s.moe), default="qwen3.5-122b-a10b")
    parser.add_argument("--build", choices=sorted(BUILDS), default="hybrid")
    parser.add_argument("--batch", type=values.count, default=1)
    parser.add_argument("--context", type=values.count, default=512)
    parser.add_argument("--layers", type=values.count, default=12)
    parser.add_argument(
        "--tune", nargs="*", choices=sorted(CHOICES), help="time every candidate configuration of these"
    )
    parser.add_argument("--compile-share", type=int, nargs=2, metavar=("I", "N"), help="only compile candidates I of N")
    parser.add_argument("--pdl", type=int, choices=(0, 1, 2), help="programmatic dependent launch: off, early, late")
    parser.add_argument("--write", type=Path, help="where to write the table with the best choices")
    parser.add_argument("--commit", help="the commit, where the checkout is not at hand")
    parser.add_argument("--out", type=values.output, default=Path("results/kernels.jsonl"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device is visible; this benchmark measures one")
    if args.pdl is not None:
        configs.set_pdl(args.pdl)
    device, kernels = torch.device("cuda", 0), args.tune if args.tune else list(CHOICES)
    if args.compile_share:
        compile_candidates(args.shape, args.build, kernels, tuple(args.compile_share), args.batch)
        return
    copy = copy_bandwidth(device)
    model = RandomModel.make(
        SHAPES[args.shape], BUILDS[args.build], batch=args.batch, context=args.context, window=1, device=device,
        n_layers=args.layers,
    )  # fmt: skip
    head_line = {"shape": args.shape, "build": args.build, "copy_tb_s": rounded(copy / 1e12)}
    if args.tune is not None:
        for line in tune(model, kernels, args.batch, args.context, copy):
            append(args.out, line | head_line | environment(device, args.commit))
        if args.write:
            configs.save(configs.TABLE, args.write)
    table = kernel_table(model, args.batch, args.context, copy)
    print_table(table)
    for line in table:
        append(args.out, line | head_line | environment(device, args.commit))


if __name__ == "__main__":
    main()
