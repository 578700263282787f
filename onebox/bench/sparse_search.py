"""Search a pattern of sparse prefill for every attention head, and say what it costs in quality.

    onebox bench sparse-search --length 4096 --budget 1024 --out patterns.json

Every head tries every pattern that reads about `--budget` keys a row, on prompts computed densely, and keeps the one
with the least error of its output. Beside the error stands the share of attention that the pattern retains. What is
found is then held against dense attention on texts that were not searched: KL, top-1, perplexity, and numbers to
recall, each for dense prompts, one vertical-slash pattern for all heads, and the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onebox.bench import values
from onebox.bench.chat import key_value_items
from onebox.bench.quality import (
    HELDOUT,
    agreement,
    check_lengths,
    needle_items,
    next_token_logits,
    open_build,
    read_windows,
    recall,
)
from onebox.bench.record import aligned, append, environment, rounded
from onebox.config import bundled_model
from onebox.engine.engine import Engine
from onebox.errors import ConfigError
from onebox.kernels.sparse_attention_ref import (
    LOCAL,
    OBSERVED,
    PAGE,
    SPAN,
    HeadPattern,
    retained_ref,
    sparse_attention_ref,
    sparse_index_ref,
)
from onebox.model.load import Loaded
from onebox.model.qwen3_5 import Qwen35
from onebox.model.sparse import SparsePrefill, write_table
from onebox.server.chat import Tokenizer


def candidates(budget: int) -> tuple[HeadPattern, ...]:
    """Patterns that read about `budget` keys a row beside the first page and the local ones."""
    pages = max(budget // PAGE, 1)
    splits = sorted({max(pages * part // 4, 1) for part in (1, 2, 3)})
    return (
        *(HeadPattern("vertical_slash", columns=budget - n * PAGE, pages=n) for n in splits if budget > n * PAGE),
        HeadPattern("a_shape", pages=pages + LOCAL),
        HeadPattern("block_sparse", pages=pages),
    )


@dataclass
class Search:
    """Sums over prompts of every candidate's squared error and retained attention, for each layer: [candidates, H]."""

    options: tuple[HeadPattern, ...]
    error: dict[int, Tensor] = field(default_factory=dict)
    size: dict[int, Tensor] = field(default_factory=dict)
    retained: dict[int, Tensor] = field(default_factory=dict)
    prompts: dict[int, int] = field(default_factory=dict)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Try everything on one layer's prompt: q [T, H, D], k, v [T, Hkv, D]. Rows that stay dense do not count."""
        n = q.shape[1]
        full = sparse_attention_ref(q, k, v, sparse_index_ref(q, k, 0, [HeadPattern()] * n)).float()
        position = torch.arange(len(q), device=q.device)
        ends = torch.minimum((position // SPAN + 1) * SPAN, torch.tensor(len(q)))
        counted = position // PAGE < (ends - OBSERVED) // PAGE
        errors, kept = [], []
        for option in self.options:
            index = sparse_index_ref(q, k, 0, [option] * n)
            out = sparse_attention_ref(q, k, v, index).float()
            errors.append((out - full)[counted].square().sum((0, 2)))
            kept.append(retained_ref(q, k, index))
        size = full[counted].square().sum((0, 2))
        for total, value in (
            (self.error, torch.stack(errors)),
            (self.retained, torch.stack(kept)),
            (self.size, size),
        ):
            total[layer] = total[layer] + value if layer in total else value
        self.prompts[layer] = self.prompts.get(layer, 0) + 1

    def best(self) -> list[list[HeadPattern]]:
        """The pattern of the least error for each head: [layer][head]."""
        return [[self.options[i] for i in self.error[n].argmin(0).tolist()] for n in sorted(self.error)]

    def rows(self) -> list[dict[str, Any]]:
        """For each layer and head: its pattern, relative RMS error of its output, share of attention retained."""
        found = []
        for n in sorted(self.error):
            for h, i in enumerate(self.error[n].argmin(0).tolist()):
                relative = float((self.error[n][i, h] / self.size[n][h].clamp(min=1e-30)).sqrt())
                kept = float(self.retained[n][i, h]) / self.prompts[n]
                found.append({"layer": n, "head": h, "pattern": self.options[i], "error": relative, "retained": kept})
        return found

    def records(self) -> list[dict[str, Any]]:
        """`rows` as a result line has them."""
        return [
            {
                "layer": row["layer"],
                "head": row["head"],
                **vars(row["pattern"]),
                "error": rounded(row["error"]),
                "retained": rounded(row["retained"]),
            }
            for row in self.rows()
        ]


def search(model: Qwen35, prompts: Sequence[Tensor], options: tuple[HeadPattern, ...]) -> Search:
    """Run token prompts [T] densely and try `options` on every attention layer of each."""
    found, dense = Search(options), ((HeadPattern(),) * model.spec.n_heads,) * model.spec.n_attention_layers
    watched = replace(model, sparse=SparsePrefill(dense, 0, watch=found))
    with torch.inference_mode():
        for tokens in prompts:
            next_token_logits(watched, tokens.to(model.device))
    return found


def quality(
    build: Loaded, sparse: SparsePrefill | None, windows: Sequence[Tensor], asked: Any, config: Any
) -> dict[str, Any]:
    """Fields of a result line: agreement with the dense model, and recall at the asked lengths."""
    model = build.model
    with torch.inference_mode():
        same = agreement(model, replace(model, sparse=sparse), windows)
    found: dict[str, Any] = {
        "kl": rounded(same.kl),
        "top1": rounded(same.top1),
        "perplexity_ratio": rounded(same.perplexity / same.reference_perplexity),
    }
    engine = Engine(config, build)
    for name, items in asked.items():
        found[name] = {n: rounded(recall(engine, *given)) for n, given in items.items()}
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = values.parser(__doc__)
    parser.add_argument("model", nargs="?", default=None, help="a checkpoint's folder; the bundled model")
    parser.add_argument(
        "--text", type=values.file, nargs="+", default=[HELDOUT], metavar="FILE", help="texts to search on"
    )
    parser.add_argument("--length", type=values.count, default=4096, help="tokens of a prompt")
    parser.add_argument("--prompts", type=values.count, default=2, help="prompts to search on; as many are held out")
    parser.add_argument("--budget", type=values.count, default=1024, help="keys a row reads, about")
    parser.add_argument(
        "--sparse-from", type=values.count_or_none, default=0, help="tokens below which prompts are dense afterwards"
    )
    parser.add_argument(
        "--needles", type=values.counts, default=(), metavar="N,N", help="find numbers in N tokens of text"
    )
    parser.add_argument("--key-values", type=values.counts, default=(), metavar="N,N", help="... in N tokens of data")
    parser.add_argument("--items", type=values.count, default=20, help="numbers to find at each length")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--out", type=values.output, default=Path("patterns.json"), help="the table: for serve --sparse-table"
    )
    parser.add_argument("--results", type=values.output, help="file to append result lines to")
    parser.add_argument("--commit", help="the commit, where the checkout is not at hand")
    args = parser.parse_args(argv)
    if args.length < 2 * OBSERVED + PAGE:
        parser.error(f"--length must be at least {2 * OBSERVED + PAGE}: the last rows of a prompt are always dense")
    folder = Path(args.model or bundled_model())
    tokenizer = Tokenizer.from_folder(folder)
    windows, texts = read_windows(tokenizer, args.text, args.length, 2 * args.prompts)
    windows = [w for w in windows if len(w) == args.length]
    if len(windows) < 2:
        raise ConfigError(
            f"the texts hold {len(windows)} prompts of {args.length} tokens; give more, or --length less."
        )
    half = len(windows) // 2
    config, build = open_build(folder, args.device)
    spec = build.model.spec
    check_lengths((*args.needles, *args.key_values), spec.max_positions)
    found = search(build.model, windows[:half], candidates(args.budget))
    write_table(found.best(), args.out)
    table = [("layer", "head", "pattern", "columns", "pages", "error", "retained")]
    for row in found.rows():
        p = row["pattern"]
        table.append(
            (str(row["layer"]), str(row["head"]), p.kind, str(p.columns), str(p.pages), f"{row['error']:.3f}",
             f"{row['retained']:.3f}")
        )  # fmt: skip
    print("\n".join(aligned(table)))
    one = candidates(args.budget)[0]
    modes = {
        "dense": None,
        "vertical_slash": SparsePrefill(((one,) * spec.n_heads,) * spec.n_attention_layers, args.sparse_from),
        "table": SparsePrefill(tuple(map(tuple, found.best())), args.sparse_from),
    }
    asked = {
        "needles": {n: (tokenizer, needle_items(tokenizer, texts, n, args.items)) for n in args.needles},
        "key_values": {n: (tokenizer, key_value_items(tokenizer, n, args.items)) for n in args.key_values},
    }
    held = [w.to(build.model.device) for w in windows[half:]]
    for mode, sparse in modes.items():
        path = args.out.with_suffix(f".{mode}.tmp")
        options: dict[str, Any] = {}
        if sparse is not None:
            write_table(sparse.patterns, path)
            options = {"prefill_attention": "minference", "sparse_from": args.sparse_from, "sparse_table": str(path)}
        try:
            row = quality(build, sparse, held, asked, replace(config, **options))
        finally:
            path.unlink(missing_ok=True)
        print(f"{mode}: " + ", ".join(f"{k} {v}" for k, v in row.items() if v != {}))
        if args.results:
            record = {"bench": "sparse-search", "model": folder.name, "mode": mode, "length": args.length}
            record |= {"budget": args.budget, "sparse_from": args.sparse_from, "text": [f.name for f in args.text]}
            if mode == "table":
                record |= {"heads": found.records()}
            append(args.results, record | row | environment(build.model.device, args.commit))
    print(f"patterns in {args.out}: onebox serve --prefill-attention minference --sparse-table {args.out}")
