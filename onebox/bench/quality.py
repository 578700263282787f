"""A build against its reference: KL, top-1 agreement, perplexity, recall by length, drafts kept by position; a gate.

    onebox bench quality BUILD... --against REFERENCE --needles 512,1024 --key-values 512,1024
    onebox bench quality BUILD --against REFERENCE --text notes.txt --max-kl 0.03 --min-top1 0.9   # exit 3: failed

    onebox bench quality BUILD --against REFERENCE --kv-cache-dtype auto,fp8,tq4 --key-values 512,1024   # KV pages

Texts: plain files are cut into windows one after another, of a .jsonl file each line's `text` gives one window. Left
out, the packaged held-out meetings and problems are read (onebox/bench/texts). Numbers to recall are made from a seed.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as RustTokenizer
from torch import Tensor

from onebox.bench import values
from onebox.bench.chat import Item, key_value_items, score
from onebox.bench.record import aligned, append, environment, rounded
from onebox.config import EngineConfig
from onebox.engine.engine import Engine
from onebox.engine.plan import kv_format
from onebox.errors import ConfigError
from onebox.ledger import Build, kv_bytes_per_token
from onebox.model.cache import KvLayout
from onebox.model.kv_layout import kv_layout
from onebox.model.load import Loaded, load_model
from onebox.model.qwen3_5 import Qwen35
from onebox.model.sequence import Sequences
from onebox.server.chat import Tokenizer

DRAFTS = 3
FAILED = 3  # exit status of a gate that did not hold
TEMPLATE_TOKENS = 128  # of the question and the template around a text
ANSWER_TOKENS = 32  # of a recall question
HELDOUT = Path(__file__).parent / "texts" / "heldout.jsonl"
NEEDLE_QUESTION = "What is the special magic number mentioned in the text?"


@dataclass(frozen=True)
class Agreement:
    """How a build's next-token distributions differ from the reference's. KL(reference || build) in nats a token."""

    kl: float
    top1: float
    perplexity: float
    reference_perplexity: float
    tokens: int


@dataclass(frozen=True)
class Acceptance:
    """Greedy drafts over steps as the engine makes them: `reach[i]` is the share of steps in which drafts 0..i held."""

    reach: tuple[float, ...]
    steps: int

    @property
    def tokens_per_step(self) -> float:
        return 1.0 + sum(self.reach)


@dataclass(frozen=True)
class Quality:
    """All of it for one build. Recall maps the length of a prompt in tokens to the share of numbers found."""

    agreement: Agreement
    acceptance: Acceptance | None = None  # None: no MTP head
    needles: dict[int, float] = field(default_factory=dict)
    key_values: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Thresholds:
    """Bounds of a gate; None (or an empty tuple) is no bound. `min_acceptance[i]` is of drafts 0..i."""

    max_kl: float | None = None
    min_top1: float | None = None
    max_perplexity_ratio: float | None = None
    min_needles: float | None = None
    min_key_values: float | None = None
    min_acceptance: tuple[float, ...] = ()

    def misses(self, found: Quality) -> list[str]:
        """What does not hold, with figure and bound. A bound on what was not measured is a miss."""
        missed = []

        def check(flag: str, what: str, value: float | None, bound: float | None, *, above: bool) -> None:
            if bound is None:
                return
            if value is None:
                missed.append(f"{what} was not measured, and {flag} {bound:g} asks for it")
            elif not (value >= bound if above else value <= bound):  # so that NaN fails
                missed.append(f"{what} {value:.4g} is {'below' if above else 'above'} {flag} {bound:g}")

        a = found.agreement
        check("--max-kl", "KL", a.kl, self.max_kl, above=False)
        check("--min-top1", "top-1 agreement", a.top1, self.min_top1, above=True)
        ratio = a.perplexity / a.reference_perplexity
        check("--max-perplexity-ratio", "perplexity ratio", ratio, self.max_perplexity_ratio, above=False)
        for flag, what, recall, bound in (
            ("--min-needles", "needle recall", found.needles, self.min_needles),
            ("--min-key-values", "key-value recall", found.key_values, self.min_key_values),
        ):
            if not recall:
                check(flag, what, None, bound, above=True)
            for length, share in recall.items():
                check(flag, f"{what} at {length} tokens", share, bound, above=True)
        reach = found.acceptance.reach if found.acceptance is not None else ()
        for i, bound in enumerate(self.min_acceptance):
            value = reach[i] if i < len(reach) else None
            check("--min-acceptance", f"share of steps that kept {i + 1} drafts", value, bound, above=True)
        return missed


def next_token_logits(model: Qwen35, tokens: Tensor, kv: KvLayout | None = None) -> Tensor:
    """tokens [T] -> fp32 logits [T, V] of one fresh sequence, over KV pages of layout `kv`."""
    return model.logits(Sequences(model, 1, len(tokens), kv=kv).forward(tokens[None])[0])


def agreement(reference: Qwen35, build: Qwen35, windows: Sequence[Tensor], kv: KvLayout | None = None) -> Agreement:
    """Over token windows [T] each: every position but the last predicts its successor. `kv`: pages of the build."""
    kl = same = loss = reference_loss = 0.0
    count = 0
    for tokens in windows:
        both = (build, kv), (reference, None)
        ours, theirs = (next_token_logits(m, tokens, pages)[:-1].log_softmax(-1) for m, pages in both)
        kl += float((theirs.exp() * (theirs - ours)).sum())
        same += float((ours.argmax(-1) == theirs.argmax(-1)).sum())
        target = tokens[1:, None]
        loss -= float(ours.gather(-1, target).sum())
        reference_loss -= float(theirs.gather(-1, target).sum())
        count += len(tokens) - 1
    return Agreement(kl / count, same / count, math.exp(loss / count), math.exp(reference_loss / count), count)


def greedy(model: Qwen35, prompts: Tensor, n_new: int, kv: KvLayout | None = None) -> tuple[Tensor, Tensor]:
    """prompts [n, T] -> tokens [n, T + n_new] and hidden states [n, T + n_new - 1, H]."""
    run = Sequences(model, len(prompts), prompts.shape[1] + n_new, kv=kv)
    tokens, hidden = prompts, [run.forward(prompts)]
    for _ in range(n_new - 1):
        best = model.logits(hidden[-1][:, -1]).argmax(-1, keepdim=True)
        tokens = torch.cat((tokens, best), dim=1)
        hidden.append(run.forward(best))
    best = model.logits(hidden[-1][:, -1]).argmax(-1, keepdim=True)
    return torch.cat((tokens, best), dim=1), torch.cat(hidden, dim=1)


def acceptance(
    model: Qwen35, prompts: Tensor, n_new: int = 64, drafts: int = DRAFTS, kv: KvLayout | None = None
) -> Acceptance:
    """Draft along the model's own greedy continuations of prompts [n, T], step by step as speculation would."""
    tokens, hidden = greedy(model, prompts, n_new, kv)
    reached, steps = [0] * drafts, 0
    for row, states in zip(tokens, hidden, strict=True):
        run = Sequences(model, 1, len(row) + drafts, kv=kv)
        done, known = 1, prompts.shape[1] + 1  # drafter rows done; tokens known, the last not yet read by the model
        while known + drafts <= len(row):
            out = run.draft(row[None, done:known], done, states[done - 1 : known - 1])
            done, out = known, out[-1:]
            accepted = 0
            for i in range(drafts):
                draft = model.logits(out).argmax(-1)
                if int(draft) != int(row[known + i]):
                    break
                accepted += 1
                reached[i] += 1
                if i + 1 < drafts:
                    out = run.draft(draft[None], known + i, out)
            steps += 1
            known += accepted + 1
    return Acceptance(tuple(r / max(steps, 1) for r in reached), steps)


def needle_items(tokenizer: Tokenizer, texts: Sequence[str], length: int, n: int, seed: int = 0) -> list[Item]:
    """`n` six-digit numbers, each hidden at an even depth of `length` tokens of text; texts follow one another."""
    rng, items = random.Random(seed), []
    for i in range(n):
        number = str(rng.randrange(100_000, 1_000_000))
        ids: list[int] = []
        at = i
        while len(ids) < length:
            more = tokenizer.encode(texts[at % len(texts)] + "\n")
            if not more:
                raise ConfigError("a text to hide numbers in is empty; give texts with words.")
            ids += more
            at += 1
        body = tokenizer.decode(ids[:length])
        cut = max(body.find(" ", int(len(body) * i / max(n - 1, 1) * 0.98)), 0)
        body = f"{body[:cut]} The special magic number is {number}.{body[cut:]}"
        items.append(Item(f"{body}\n\n{NEEDLE_QUESTION}", number))
    return items


def recall(engine: Engine, tokenizer: Tokenizer, items: Sequence[Item]) -> float:
    """Share of items whose number is in a greedy answer without thinking."""
    return score(engine, tokenizer, items, ANSWER_TOKENS).right


def read_texts(path: Path) -> list[str]:
    """The `text` of every line of a .jsonl file; another file is one text. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text ({e}).") from e
    if path.suffix != ".jsonl":
        return [text]
    texts = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as e:
            raise ConfigError(f"{path}, line {number}: not JSON ({e}); give one object a line.") from e
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            raise ConfigError(f"{path}, line {number}: no field 'text'; give objects such as {{\"text\": ...}}.")
        texts.append(row["text"])
    return texts


def tokenizer_of(folder: Path) -> RustTokenizer:
    return RustTokenizer.from_file(str(folder / "tokenizer.json"))


def windows_of(tokenizer: RustTokenizer, texts: Sequence[str], length: int) -> list[Tensor]:
    """One window of at most `length` tokens of each text."""
    return [torch.tensor(tokenizer.encode(text).ids[:length]) for text in texts]


def read_windows(tokenizer: Tokenizer, paths: Iterable[Path], length: int, most: int) -> tuple[list[Tensor], list[str]]:
    """Token windows, `most` of them at most, and the texts. Raises ConfigError when there is nothing to predict."""
    windows, texts = [], []
    for path in paths:
        for text in read_texts(path):
            texts.append(text)
            ids = tokenizer.encode(text)
            ends = length if path.suffix == ".jsonl" else len(ids)
            windows += [torch.tensor(ids[i : i + length]) for i in range(0, min(ends, len(ids)), length)]
    windows = [w for w in windows if len(w) > 1][:most]
    if not windows:
        raise ConfigError(f"no text of two tokens in {', '.join(map(str, paths))}; give longer texts.")
    return windows, texts


@dataclass(frozen=True)
class Measure:
    """What to measure, over which texts. Lengths in tokens; `items` numbers to recall at each length."""

    windows: Sequence[Tensor]
    texts: Sequence[str]
    needles: Sequence[int] = ()
    key_values: Sequence[int] = ()
    items: int = 20
    prompt_tokens: int = 128
    new_tokens: int = 64

    def of(self, reference: Qwen35, build: Loaded, tokenizer: Tokenizer, config: EngineConfig) -> Quality:
        """`config` opens an engine over `build` for the questions. Raises ConfigError."""
        if reference.spec.vocab != build.model.spec.vocab:
            raise ConfigError(
                f"{config.model} has a vocabulary of {build.model.spec.vocab}, its reference {reference.spec.vocab}; "
                "compare builds of one model."
            )
        kv = kv_layout(build.model, config.kv_cache_dtype)
        with torch.inference_mode():
            same = agreement(reference, build.model, [w.to(build.model.device) for w in self.windows], kv)
            drafted = None
            prompts = [w[: self.prompt_tokens] for w in self.windows if len(w) >= self.prompt_tokens]
            if build.model.mtp is not None and prompts:
                begun = torch.stack(prompts).to(build.model.device)
                drafted = acceptance(build.model, begun, self.new_tokens, kv=kv)
        found: dict[str, dict[int, float]] = {"needles": {}, "key_values": {}}
        if self.needles or self.key_values:
            engine = Engine(config, build)
            for n in self.needles:
                found["needles"][n] = recall(engine, tokenizer, needle_items(tokenizer, self.texts, n, self.items))
            for n in self.key_values:
                found["key_values"][n] = recall(engine, tokenizer, key_value_items(tokenizer, n, self.items))
        return Quality(same, drafted, **found)


def record_of(found: Quality, build: Loaded, items: int) -> dict[str, Any]:
    """Fields of a result line."""
    record: dict[str, Any] = {k: v if k == "tokens" else rounded(v) for k, v in asdict(found.agreement).items()}
    record["weight_bytes"] = sum(build.report.formats.values())
    if found.acceptance is not None:
        record |= {"reach": [rounded(r) for r in found.acceptance.reach], "steps": found.acceptance.steps}
    for name in ("needles", "key_values"):
        if recalled := getattr(found, name):
            record[f"{name.removesuffix('s')}_recall"] = {str(n): rounded(share, 3) for n, share in recalled.items()}
            record["items"] = items
    return record


def lines(rows: Sequence[tuple[str, Quality]]) -> list[str]:
    """A table of builds; the reference's perplexity stands in its own column."""
    lengths = {name: sorted({n for _, q in rows for n in getattr(q, name)}) for name in ("needles", "key_values")}
    head = ["build", "KL", "top-1", "perplexity", "reference", "drafts kept"]
    head += [f"needle {n}" for n in lengths["needles"]] + [f"key-value {n}" for n in lengths["key_values"]]
    table = [head]
    for name, q in rows:
        a = q.agreement
        drafts = " / ".join(f"{r:.2f}" for r in q.acceptance.reach) if q.acceptance else "-"
        row = [name, f"{a.kl:.4f}", f"{a.top1:.4f}", f"{a.perplexity:.3f}", f"{a.reference_perplexity:.3f}", drafts]
        for kind in ("needles", "key_values"):
            row += [f"{getattr(q, kind)[n]:.2f}" if n in getattr(q, kind) else "-" for n in lengths[kind]]
        table.append(row)
    return aligned(table)


def check_lengths(lengths: Sequence[int], most: int) -> None:
    """Raises ConfigError for a text to find numbers in that is longer than the model reads."""
    room = most - ANSWER_TOKENS - TEMPLATE_TOKENS
    if too_long := [n for n in lengths if n > room]:
        raise ConfigError(f"numbers cannot be hidden in {too_long[0]} tokens: the model reads {most}; {room} at most.")


def open_build(path: Path, device: str) -> tuple[EngineConfig, Loaded]:
    """A build as the engine would load it, and a config for an engine over it."""
    config = EngineConfig(model=str(path), device=device, draft_len=0, max_num_seqs=8)
    definite = config.resolve_device(cuda_devices=torch.cuda.device_count())
    loaded = load_model(path, device=definite.device, dtype=getattr(torch, definite.dtype), fused=bool(definite.fused))
    return config, loaded


def kv_bytes(build: Loaded, config: EngineConfig) -> float:
    """Bytes of a token's keys and values over all layers, the drafter's too."""
    definite = config.resolve_device(cuda_devices=torch.cuda.device_count())
    return kv_bytes_per_token(build.model.spec, Build(kv=kv_format(definite)), mtp=build.model.mtp is not None)


def main(argv: Sequence[str] | None = None) -> None:
    parser = values.parser(__doc__)
    parser.add_argument("builds", type=values.folder, nargs="+", metavar="BUILD")
    parser.add_argument(
        "--against", type=values.folder, required=True, metavar="REFERENCE", help="usually the 16-bit original"
    )
    parser.add_argument(
        "--text", type=values.file, nargs="+", default=[HELDOUT], metavar="FILE", help="texts to predict"
    )
    parser.add_argument("--window", type=values.count, default=512, help="tokens of a window")
    parser.add_argument("--windows", type=values.count, default=64, help="at most so many")
    parser.add_argument(
        "--needles", type=values.counts, default=(), metavar="N,N", help="find numbers in N tokens of text"
    )
    parser.add_argument("--key-values", type=values.counts, default=(), metavar="N,N", help="... in N tokens of data")
    parser.add_argument("--items", type=values.count, default=20, help="numbers to find at each length")
    parser.add_argument(
        "--prompt-tokens", type=values.count, default=128, help="beginnings that drafts are tried after"
    )
    parser.add_argument("--new-tokens", type=values.count, default=64, help="tokens drafted along, each")
    parser.add_argument("--max-kl", type=values.not_negative, help="nats a token")
    parser.add_argument("--min-top1", type=values.share)
    parser.add_argument("--max-perplexity-ratio", type=values.positive, help="build's over the reference's")
    parser.add_argument("--min-needles", type=values.share, help="recall at every length")
    parser.add_argument("--min-key-values", type=values.share, help="recall at every length")
    parser.add_argument("--min-acceptance", type=values.shares, default=(), metavar="A,A", help="of 1, 2, ... drafts")
    parser.add_argument(
        "--kv-cache-dtype",
        default="auto",
        metavar="A,B",
        help="KV page formats of the builds; the reference's are auto",
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--commit", help="the commit, where the checkout is not at hand")
    parser.add_argument("--out", type=values.output, help="file to append result lines to")
    args = parser.parse_args(argv)
    formats = args.kv_cache_dtype.split(",")
    for kv in formats:
        EngineConfig(model="", kv_cache_dtype=kv)  # a name that is not one is refused before anything is loaded
    bounds = Thresholds(**{name: getattr(args, name) for name in Thresholds.__dataclass_fields__})
    tokenizer = Tokenizer.from_folder(args.against)
    windows, texts = read_windows(tokenizer, args.text, args.window, args.windows)
    measure = Measure(windows, texts, args.needles, args.key_values, args.items, args.prompt_tokens, args.new_tokens)
    reference = open_build(args.against, args.device)[1].model
    check_lengths((*args.needles, *args.key_values), reference.spec.max_positions)
    rows, failures = [], list[str]()
    opened: tuple[EngineConfig, Loaded] | None = None
    for build, kv in itertools.product(args.builds, formats):
        if kv == formats[0]:
            opened = open_build(build, args.device)
        assert opened is not None
        config, loaded = replace(opened[0], kv_cache_dtype=kv), opened[1]
        found = measure.of(reference, loaded, tokenizer, config)
        name = build.name if formats == ["auto"] else f"{build.name} {kv}"
        rows.append((name, found))
        missed = bounds.misses(found)
        failures += [f"{name}: {line}" for line in missed]
        if args.out:
            record = {"bench": "quality", "model": args.against.name, "build": build.name, "kv": kv}
            record |= {"kv_bytes_per_token": kv_bytes(loaded, config)}
            record |= {"text": [file.name for file in args.text], "window": args.window}
            record |= record_of(found, loaded, args.items)
            if bounds != Thresholds():
                record |= {"gate": "failed" if missed else "held"}
            append(args.out, record | environment(loaded.model.device, args.commit))
    print("\n".join(lines(rows)))
    if failures:
        for line in failures:
            print(f"onebox: quality gate failed: {line}", file=sys.stderr)
        sys.exit(FAILED)
    if bounds != Thresholds():
        print("quality gate held", file=sys.stderr)
