"""The ladder: one rung a technique, each timed in turn with the rung below, speed and quality side by side.

    onebox bench ladder                        # the bundled model as it is: drafts, prefix cache, compression
    onebox bench ladder ORIGINAL --builds DIR  # a 16-bit checkpoint: its builds are made first, then rung by rung
    onebox bench ladder --shape qwen3.5-122b-a10b --weights random --force-acceptance 0.9,0.8   # speed alone, on a GPU
    onebox bench ladder --shape tiny --weights random           # the same without a GPU: how it goes, not how fast

A rung is checked before it is timed: finite and stored logits of its build, and text that drafts or a cache leave as it
was. Every repeat runs the rung below and the rung itself, one after the other, first the one, then the other; a gain is
the median of the repeats' ratios. Time to the first token is over long documents, asked about twice; it holds the time
of compressing them. Recall is of numbers hidden in those documents, through the rung's whole path.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from onebox.bench import values
from onebox.bench.chat import Item
from onebox.bench.drafters import TOPICS
from onebox.bench.protocol import FIVE_PROMPTS
from onebox.bench.quality import HELDOUT, NEEDLE_QUESTION, Agreement, agreement, needle_items, read_windows
from onebox.bench.record import aligned, append, copy_bandwidth, environment, rounded
from onebox.checkpoint.write import BuildOptions, build
from onebox.config import EngineConfig, bundled_model
from onebox.engine.engine import Engine
from onebox.engine.plan import kv_format
from onebox.errors import OneboxError
from onebox.ledger import BUILDS, SHAPES, Build, kv_bytes_per_token, ladder, resident_bytes, step_bytes
from onebox.model.kv_layout import kv_layout
from onebox.model.load import Loaded, load_model
from onebox.model.selfcheck import self_check
from onebox.request import Request, SamplingParams
from onebox.server.chat import Tokenizer
from onebox.spec import Spec

FAILED = 3  # exit status: a rung's checks did not hold
RATE = 0.5  # of compressed documents
AGAIN = "Which number was it? Look once more."
ANSWER_TOKENS = 32
CHECK_TOKENS = 24
TINY = "tiny"  # the bundled model's shape: the one that a CPU can run with random weights


@dataclass(frozen=True)
class Technique:
    """One rung: everything below it, and one thing more. `build` None takes the checkpoint as it is."""

    name: str
    build: Build | None
    k: int = 0
    kv: str = "auto"  # EngineConfig's kv_cache_dtype
    prefix: bool = False
    rate: float | None = None  # output over input tokens of compressed documents

    @property
    def keeps_text(self) -> bool:
        """Whether it must say what the rung below says, if its build is the same."""
        return self.rate is None


def techniques(
    packed: bool, drafts: Sequence[int], rate: float, *, mtp: bool = True, kv: Sequence[str] = ()
) -> tuple[Technique, ...]:
    """Rungs from the bottom. A `packed` checkpoint has its weights already: its rungs are what a server can switch."""
    ks = tuple(k for k in drafts if k) if mtp else ()
    if packed:
        rungs = [Technique("as it is", None), *(Technique(f"+ MTP-{k}", None, k) for k in ks)]
    else:
        wanted = [r for r in ladder(kv=()) if r.k == 0 or (r.name.endswith(f"MTP-{r.k}") and r.k in ks)]
        rungs = [Technique("16-bit", BUILDS["bf16"]), *(Technique(r.name, r.build, r.k) for r in wanted)]
        if ks:
            rungs.append(Technique("+ quantised drafter", BUILDS["hybrid"], ks[-1]))
    rungs += [replace(rungs[-1], name=f"+ {name} KV", kv=name) for name in kv]
    top = rungs[-1]
    cached = replace(top, name="+ prefix cache", prefix=True)
    return (*rungs, cached, replace(cached, name="+ prompt compression", rate=rate))


@dataclass(frozen=True)
class Work:
    """What every rung is asked. Decode prompts as ids; documents to find numbers in as texts."""

    tokenizer: Tokenizer
    chats: tuple[tuple[int, ...], ...]
    caps: tuple[int, ...]  # most tokens of each chat's answer
    documents: tuple[Item, ...]
    timed: int = 2  # so many documents are timed in each repeat
    whole: bool = False  # time whole answers, as the five-prompt protocol does


@dataclass(frozen=True)
class Sample:
    """One pass over the chats and the first documents. Times in milliseconds."""

    tok_s: float
    ms_per_step: float
    tokens_per_step: float
    ttft_ms: float
    ttft_again_ms: float
    said: tuple[tuple[int, ...], ...] = ()
    acceptance: float | None = None


class Rung(Protocol):
    """A technique ready to be measured."""

    technique: Technique

    def sample(self) -> Sample: ...


class Served:
    """A rung of a checkpoint: an engine over its build, and the compressor before it."""

    def __init__(self, technique: Technique, path: Path, loaded: Loaded, work: Work, device: str, context: int) -> None:
        self.technique, self.path, self.loaded, self.work = technique, path, loaded, work
        spec = loaded.model.spec
        tokens = (len(work.documents[: work.timed]) + 2) * (context + max(work.caps) + 512)
        need = tokens * kv_bytes_per_token(spec, Build(kv="fp32"), mtp=True) / 1e9
        config = EngineConfig(
            model=str(path), device=device, draft_len=technique.k, max_num_seqs=1, kv_gb=max(need, 0.05),
            max_model_len=min(context + max(work.caps) + 512, spec.max_positions), prefix_caching=technique.prefix,
            self_check=False, kv_cache_dtype=technique.kv,
        )  # fmt: skip
        self.engine = Engine(config, loaded)
        self.passes = 0  # each finds an empty prefix cache: it has a salt of its own
        self.compressor: Any = None
        if technique.rate is not None:
            from onebox.prompt.compressor import Compressor

            self.compressor = Compressor("auto")

    def shortened(self, document: str) -> str:
        """The document as this rung sends it."""
        if self.compressor is None:
            return document
        made = self.compressor.compress(
            document, question=NEEDLE_QUESTION, rate=self.technique.rate, append_question=False
        )
        return str(made.text)

    def ask(self, ids: tuple[int, ...], max_tokens: int, *, to_the_end: bool) -> tuple[list[int], list[float]]:
        """Tokens of a greedy answer, and at which second each step's came."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=not to_the_end)
        start, tokens, at = time.perf_counter(), list[int](), list[float]()
        ends = self.work.tokenizer.turn_ends(ids)
        self.engine.add(Request("ladder", ids, params, snapshot_at=ends, cache_salt=str(self.passes)))
        while self.engine.has_work:
            for output in self.engine.step():
                if output.tokens:
                    tokens += output.tokens
                    at.append(time.perf_counter() - start)
        return tokens, at

    def sample(self) -> Sample:
        self.passes += 1
        seconds, decoded, steps = 0.0, 0, 0
        said = list[tuple[int, ...]]()
        before = self.engine.stats()
        for ids, cap in zip(self.work.chats, self.work.caps, strict=True):
            start = time.perf_counter()
            tokens, at = self.ask(ids, cap, to_the_end=self.work.whole)
            said.append(tuple(tokens))
            steps += len(at) - 1
            if self.work.whole:
                seconds, decoded = seconds + time.perf_counter() - start, decoded + len(tokens)
            elif len(at) > 1:
                seconds, decoded = seconds + at[-1] - at[0], decoded + len(tokens) - 1  # the prompt's step gave one
        after = self.engine.stats()
        drafted = after.drafted_tokens - before.drafted_tokens
        kept = after.accepted_tokens - before.accepted_tokens
        first, again = self.first_token_ms()
        return Sample(
            tok_s=decoded / seconds,
            ms_per_step=seconds / max(steps, 1) * 1e3,
            tokens_per_step=decoded / max(steps, 1),
            ttft_ms=first,
            ttft_again_ms=again,
            said=tuple(said),
            acceptance=kept / drafted if drafted else None,
        )

    def first_token_ms(self) -> tuple[float, float]:
        """Median milliseconds from a document and a question to the first token, and from the next question."""
        times: tuple[list[float], list[float]] = ([], [])
        for item in self.work.documents[: self.work.timed]:
            start = time.perf_counter()
            document = self.shortened(body_of(item))
            chat = [{"role": "user", "content": f"{document}\n\n{NEEDLE_QUESTION}"}]
            tokens, at = self.timed(chat, start)
            times[0].append(at)
            chat.append({"role": "assistant", "content": self.work.tokenizer.decode(tokens)})
            chat.append({"role": "user", "content": AGAIN})
            times[1].append(self.timed(chat, time.perf_counter())[1])
        return statistics.median(times[0]), statistics.median(times[1])

    def timed(self, chat: Sequence[dict[str, str]], start: float) -> tuple[list[int], float]:
        """A short answer, and the milliseconds from `start` to its first token."""
        ids = chat_ids(self.work.tokenizer, chat)
        before = time.perf_counter() - start
        tokens, at = self.ask(ids, 4, to_the_end=True)
        return tokens, (before + at[0]) * 1e3

    def recall(self) -> tuple[float, float]:
        """Share of hidden numbers in the answers, and the mean length of the prompts in tokens."""
        self.passes += 1
        right, length = 0, 0
        for item in self.work.documents:
            text = f"{self.shortened(body_of(item))}\n\n{NEEDLE_QUESTION}"
            ids = chat_ids(self.work.tokenizer, [{"role": "user", "content": text}])
            length += len(ids)
            tokens, _ = self.ask(ids, ANSWER_TOKENS, to_the_end=True)
            right += item.answer in self.work.tokenizer.decode(tokens)
        return right / len(self.work.documents), length / len(self.work.documents)

    def short_text(self) -> list[int]:
        """A few greedy tokens: what a check compares."""
        self.passes += 1
        return self.ask(self.work.chats[0], CHECK_TOKENS, to_the_end=False)[0]


class Random:
    """A rung of a shape with random weights: speed alone, with a forced share of drafts kept."""

    def __init__(self, technique: Technique, engine: Engine, prompt: int) -> None:
        self.technique, self.engine, self.prompt = technique, engine, prompt

    def sample(self) -> Sample:
        from onebox.bench.engine import decode

        with torch.inference_mode():
            ms, per_step, first = decode(self.engine, 1, self.prompt)
        return Sample(per_step / ms * 1e3, ms, per_step, first, first)


def body_of(item: Item) -> str:
    """A document with its number, without the question."""
    return item.question.removesuffix(NEEDLE_QUESTION).rstrip()


def chat_ids(tokenizer: Tokenizer, chat: Sequence[dict[str, str]], *, thinking: bool = False) -> tuple[int, ...]:
    return tuple(tokenizer.encode(tokenizer.render(list(chat), options={"enable_thinking": thinking})))


def free_chats(tokenizer: Tokenizer, n: int) -> tuple[tuple[int, ...], ...]:
    """Questions whose answers are not in them."""
    texts = [f"Write a few sentences about {TOPICS[i % len(TOPICS)]}, part {i}." for i in range(n)]
    return tuple(chat_ids(tokenizer, [{"role": "user", "content": text}]) for text in texts)


@dataclass(frozen=True)
class Paired:
    """A rung and the one below it, one after the other `len(here)` times."""

    here: tuple[Sample, ...]
    below: tuple[Sample, ...] = ()

    @classmethod
    def run(cls, rung: Rung, below: Rung | None, repeats: int) -> Paired:
        """One untimed pass of each first. The order turns with every repeat."""
        for one in filter(None, (below, rung)):
            one.sample()
        found: dict[int, list[Sample]] = {0: [], 1: []}
        for i in range(repeats):
            pair = [(0, rung)] + ([(1, below)] if below is not None else [])
            for key, one in pair if i % 2 else pair[::-1]:
                found[key].append(one.sample())
        return cls(tuple(found[0]), tuple(found[1]))

    def spread(self, name: str) -> dict[str, float]:
        """Median, lowest and highest of a figure over the repeats."""
        values = [float(getattr(s, name)) for s in self.here]
        return {
            name: rounded(statistics.median(values)),
            f"{name}_low": rounded(min(values)),
            f"{name}_high": rounded(max(values)),
        }

    def ratio(self, name: str) -> dict[str, float] | None:
        """This rung's figure over the one below's in the same repeat: median, lowest, highest."""
        if not self.below:
            return None
        ratios = [getattr(a, name) / getattr(b, name) for a, b in zip(self.here, self.below, strict=True)]
        return {"median": rounded(statistics.median(ratios)), "low": rounded(min(ratios)), "high": rounded(max(ratios))}

    @property
    def same_text(self) -> float | None:
        """Share of answers that are those of the rung below, token by token."""
        if not self.below or not self.here[0].said:
            return None
        pairs = list(zip(self.here[0].said, self.below[0].said, strict=True))
        return sum(a == b for a, b in pairs) / len(pairs)

    def fields(self) -> dict[str, Any]:
        """Of a result line."""
        found: dict[str, Any] = {"repeats": len(self.here)}
        for name in ("tok_s", "ms_per_step", "ttft_ms", "ttft_again_ms"):
            found |= self.spread(name)
        found["tokens_per_step"] = rounded(statistics.median(s.tokens_per_step for s in self.here))
        acceptance = [s.acceptance for s in self.here if s.acceptance is not None]
        if acceptance:
            found["acceptance"] = rounded(statistics.median(acceptance), 3)
        for name in ("tok_s", "ttft_ms", "ttft_again_ms"):
            if (ratio := self.ratio(name)) is not None:
                found[f"{name}_over_below"] = ratio
        if (same := self.same_text) is not None:
            found["same_text"] = rounded(same, 3)
        return found


def moved_bytes(spec: Spec, made: Build, k: int, context: int, *, kv: str, unpacked: bool) -> tuple[float, float]:
    """The ledger's bytes of a step: of the build as a GPU holds it, and as this device does.

    `unpacked`: a CPU turns packed weights into fp32 once, when it loads them; its KV is fp32 or packed.
    """
    packed = step_bytes(spec, replace(made, kv="bf16" if kv == "fp32" else kv), context=context, k=k).total
    if not unpacked:
        return packed, packed
    plain = step_bytes(spec, replace(Build(), state=made.state, kv=kv), context=context, k=k)
    as_kept = plain.state + plain.kv * (1 + k / spec.n_attention_layers)  # the drafter reads a layer of KV a pass
    return packed, 2 * (plain.total - as_kept) + as_kept


class CheckFailed(OneboxError):
    """A rung says something else than it must: its speed would mean nothing."""


def same_model(rung: Served, below: Served | None) -> bool:
    """Whether two rungs give the same logits: the same weights over the same KV pages."""
    return below is not None and below.loaded is rung.loaded and below.technique.kv == rung.technique.kv


def check(rung: Served, below: Served | None) -> list[str]:
    """What was looked at before anything is timed. Raises CheckFailed, or CheckpointError for wrong logits."""
    name, done = rung.technique.name, [self_check(rung.loaded.model, rung.path, None)]
    text = rung.short_text()
    if below is not None and same_model(rung, below) and rung.technique.keeps_text:
        if text != below.short_text():
            raise CheckFailed(f"{name}: a greedy answer differs from that of {below.technique.name!r}.")
        done.append("text of the rung below")
    if rung.technique.prefix:
        before = rung.engine.stats().cached_tokens
        ids = chat_ids(rung.work.tokenizer, [{"role": "user", "content": rung.work.documents[0].question}])
        rung.passes += 1
        cold, warm = (rung.ask(ids, CHECK_TOKENS, to_the_end=False)[0] for _ in range(2))
        if cold != warm:
            raise CheckFailed(f"{name}: an answer over a cached prompt differs from the first one.")
        if rung.engine.stats().cached_tokens == before:
            raise CheckFailed(f"{name}: a prompt asked twice found nothing in the prefix cache.")
        done.append("text of a cached prompt")
    return done


@dataclass(frozen=True)
class Ladder:
    """A checkpoint and how to climb. `context` in tokens of a document; builds are made below `builds`."""

    base: Path
    work: Work
    rungs: tuple[Technique, ...]
    windows: Sequence[torch.Tensor]
    builds: Path
    device: str
    context: int
    repeats: int
    donor: str | None = None
    first: int = 1  # number of the lowest rung here; one above the bottom is not recorded without its partner

    def path(self, technique: Technique) -> Path:
        """The folder of a rung's build, made when it is not there."""
        if technique.build in (None, BUILDS["bf16"]):
            return self.base
        name = next((n for n, b in BUILDS.items() if b == technique.build), None)
        head = technique.build.head if technique.build else ""
        out = self.builds / f"{self.base.name}-{name or f'int4-fp8-{head}-head'}"
        build(str(self.base), out, BuildOptions(recipe=technique.build, donor=self.donor))
        return out

    def climb(self, heard: Callable[[str], None] = lambda text: None) -> Iterator[dict[str, Any]]:
        """One record a rung, from the bottom. Raises CheckFailed, ConfigError or CheckpointError."""
        definite = EngineConfig(str(self.base), device=self.device)
        definite = definite.resolve_device(cuda_devices=torch.cuda.device_count())
        device, cpu = torch.device(definite.device), definite.device == "cpu"
        copy = copy_bandwidth(device, 0.1 if cpu else 4.0)
        dtype = getattr(torch, definite.dtype)

        def load(path: Path) -> Loaded:
            return load_model(path, device=device, dtype=dtype, fused=bool(definite.fused))

        reference = load(self.base)
        below: Served | None = None
        known: dict[str, Any] = {}
        for number, technique in enumerate(self.rungs, self.first):
            heard(technique.name)
            path = self.path(technique)
            if below is not None and path == below.path:
                loaded = below.loaded
            else:
                loaded = reference if path == self.base else load(path)
            rung = Served(technique, path, loaded, self.work, definite.device, self.context)
            checks = check(rung, below)
            if not same_model(rung, below):
                known = self.quality(reference, rung, below)
            else:
                known = {k: v for k, v in known.items() if not k.endswith("_below")} | {"same_logits": True}
            if below is None and self.first > 1:  # it is there to be paired with
                below = rung
                continue
            paired = Paired.run(rung, below, self.repeats)
            recalled, length = rung.recall()
            spec, made = loaded.model.spec, technique.build or nearest(loaded)
            kv = kv_format(rung.engine.config)
            packed, held = moved_bytes(spec, made, technique.k, self.decode_context, kv=kv, unpacked=cpu)
            seconds = paired.spread("ms_per_step")["ms_per_step"] * 1e-3
            yield {
                "bench": "ladder", "model": self.base.name, "weights": "checkpoint", "number": number,
                "rung": technique.name, "below": below.technique.name if below else None,
                "build": self.describe(technique), "k": technique.k, "kv": kv, "prefix_cache": technique.prefix,
                "compress_rate": technique.rate, "batch": 1, "document_tokens": self.context,
                "protocol": "five-prompts" if self.work.whole else "chats", **paired.fields(),
                "bytes_per_step": int(held), "build_bytes_per_step": int(packed), "copy_tb_s": rounded(copy / 1e12),
                "roof_share": None if self.work.whole else rounded(held / copy / seconds, 3),
                "held_as": "fp32, unpacked at load" if cpu else "packed",
                "weight_bytes": sum(loaded.report.formats.values()),
                "kv_bytes_per_token": kv_bytes_per_token(spec, Build(kv=kv)),
                **known, "recall": rounded(recalled, 3), "items": len(self.work.documents),
                "prompt_tokens": round(length), **self.right(paired), "checks": checks,
            }  # fmt: skip
            below = rung

    @property
    def decode_context(self) -> int:
        """Tokens before a decode step, in the middle of the chats' answers."""
        lengths = [len(ids) + cap / 2 for ids, cap in zip(self.work.chats, self.work.caps, strict=True)]
        return round(statistics.mean(lengths))

    def describe(self, technique: Technique) -> str:
        if technique.build is None:
            return "as it is"
        name = next((n for n, b in BUILDS.items() if b == technique.build), None)
        return name or ", ".join(f"{f.name} {v}" for f in fields(Build) if (v := getattr(technique.build, f.name)))

    def quality(self, reference: Loaded, rung: Served, below: Served | None) -> dict[str, Any]:
        """KL, top-1 agreement and perplexity against the base, and the first two against the rung below."""
        loaded, layout = rung.loaded, kv_layout(rung.loaded.model, rung.technique.kv)
        windows = [w.to(loaded.model.device) for w in self.windows]
        with torch.inference_mode():
            a = agreement(reference.model, loaded.model, windows, layout)
            found = {"kl": rounded(a.kl), "top1": rounded(a.top1), "perplexity": rounded(a.perplexity)}
            found |= {"reference_perplexity": rounded(a.reference_perplexity), "quality_tokens": a.tokens}
            if below is not None and below.technique.kv == "auto":
                b: Agreement = agreement(below.loaded.model, loaded.model, windows, layout)
                found |= {"kl_below": rounded(b.kl), "top1_below": rounded(b.top1)}
        return found

    def right(self, paired: Paired) -> dict[str, Any]:
        """Of the five prompts, whether the answers that can be checked are right."""
        if not self.work.whole:
            return {}
        texts = [self.work.tokenizer.decode(list(ids)).rpartition("</think>")[2] for ids in paired.here[0].said]
        return {"right": {p.name: p.right(t) for p, t in zip(FIVE_PROMPTS, texts, strict=True) if p.right}}


def nearest(loaded: Loaded) -> Build:
    """The ledger's build nearest to what a checkpoint holds."""
    from onebox.engine.engine import build_of

    return build_of(loaded.report.formats)


def climb_shape(
    shape: str,
    drafts: Sequence[int],
    forced: tuple[float, ...],
    *,
    prompt: int,
    repeats: int,
    layers: int | None = None,
    heard: Callable[[str], None] = lambda text: None,
) -> Iterator[dict[str, Any]]:
    """Records of a shape with random weights: no quality. Kernels are checked for each build.

    Without a GPU the same steps run through plain PyTorch, which unpacks weights at each use: their lines say so, and
    have no share of a roof.
    """
    from onebox.bench import random_model
    from onebox.bench.engine import random_engine

    cuda = torch.cuda.is_available()
    device, whole = torch.device("cuda", 0) if cuda else torch.device("cpu"), shape_of(shape)
    spec = replace(whole, layer_types=whole.layer_types[:layers])
    copy = copy_bandwidth(device) if cuda else None
    below: Random | None = None
    model: Any = None
    rungs = [t for t in techniques(False, drafts, RATE) if not t.prefix and t.build not in (None, BUILDS["bf16"])]
    for number, technique in enumerate(rungs, 1):
        heard(technique.name)
        made = technique.build
        assert made is not None
        errors: dict[str, float] = {}
        paired_in_memory = below is not None
        if below is None or made != below.technique.build:
            if cuda:
                errors = random_model.check(whole, made, device)
                if not max(errors.values()) <= 3e-2:
                    raise CheckFailed(f"{technique.name}: kernels differ from their references: {errors}.")
                torch.cuda.empty_cache()
                need, free = resident_bytes(spec, made).weights, torch.cuda.mem_get_info(device)[0]
                if need * 1.02 + 4e9 > free:  # no room for both: this rung is timed alone
                    paired_in_memory, below, model = False, None, None
                    torch.cuda.empty_cache()
            model = random_model.random_model_weights(spec, made, device)
            if not cuda:
                model = replace(model, fused=None)
        kept = tuple(forced[: technique.k]) + (forced[-1],) * (technique.k - len(forced))
        engine = random_engine(model, shape, technique.k, 1, prompt + 2048, kept, kv_gb=1.0 if cuda else 0.1)
        rung = Random(technique, engine, prompt)
        paired = Paired.run(rung, below, repeats)
        packed, _ = moved_bytes(spec, made, technique.k, prompt + 192, kv="bf16", unpacked=False)
        seconds = paired.spread("ms_per_step")["ms_per_step"] * 1e-3
        found = {k: v for k, v in paired.fields().items() if "again" not in k}
        yield {
            "bench": "ladder", "model": shape, "weights": "random", "number": number, "rung": technique.name,
            "below": rungs[number - 2].name if number > 1 else None, "paired": paired_in_memory, "k": technique.k,
            "build": ", ".join(f"{f.name} {getattr(made, f.name)}" for f in fields(Build)),
            "forced_acceptance": list(kept), "batch": 1, "prompt": prompt, **found, "bytes_per_step": int(packed),
            "copy_tb_s": rounded(copy / 1e12) if copy else None,
            "roof_share": rounded(packed / copy / seconds, 3) if copy else None,
            "held_as": "packed" if cuda else "packed, unpacked at each use: no speed of the formats",
            "weight_bytes": int(resident_bytes(spec, made).weights),
            "checks": {name: rounded(e, 2) for name, e in errors.items()}
            or ("kernels as the rung below" if cuda else "none: plain PyTorch is the reference itself"),
        }  # fmt: skip
        below = rung


def shape_of(name: str) -> Spec:
    """A published shape, or the bundled model's by the name of `tiny`."""
    return Spec.from_config(config_of(Path(bundled_model()))) if name == TINY else SHAPES[name]


def lines(records: Sequence[dict[str, Any]]) -> list[str]:
    """A table of rungs for a terminal."""
    table = [
        ["rung", "tok/s", "spread", "x below", "roof", "TTFT ms", "next", "GB", "KL", "top-1", "ppl", "recall", "kept"]
    ]
    for r in records:
        ratio = r.get("tok_s_over_below")
        table.append(
            [
                r["rung"],
                f"{r['tok_s']:.4g}",
                f"{r['tok_s_low']:.4g}-{r['tok_s_high']:.4g}",
                f"{ratio['median']:.3f}" if ratio else "-",
                f"{r['roof_share']:.2f}" if r.get("roof_share") is not None else "-",
                f"{r['ttft_ms']:.4g}",
                f"{r['ttft_again_ms']:.4g}" if "ttft_again_ms" in r else "-",
                f"{r['weight_bytes'] / 1e9:.3f}",
                *(f"{r[name]:.4g}" if name in r else "-" for name in ("kl", "top1", "perplexity", "recall")),
                f"{r['acceptance']:.2f}" if "acceptance" in r else "-",
            ]
        )
    return aligned(table)


@contextmanager
def build_folder(given: Path | None) -> Iterator[Path]:
    """Where builds are made: kept where a folder was given, else gone afterwards."""
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="onebox-ladder-") as folder:
        yield Path(folder)


def is_packed(base: Path) -> bool:
    """Whether a checkpoint holds anything but 16-bit or fp32 weights."""
    from onebox.checkpoint.reader import WeightReader

    return bool(WeightReader.open(base).config.get("quantization_config"))


def work_of(base: Path, args: argparse.Namespace) -> tuple[Work, list[torch.Tensor]]:
    """What to ask, and the windows that quality is measured on."""
    tokenizer = Tokenizer.from_folder(base)
    windows, texts = read_windows(tokenizer, args.text, args.window, args.windows)
    documents = tuple(needle_items(tokenizer, texts, args.document, args.items))
    whole = args.protocol == "five-prompts"
    if whole:
        chats = tuple(chat_ids(tokenizer, [{"role": "user", "content": p.text}], thinking=True) for p in FIVE_PROMPTS)
        caps = tuple(min(p.max_tokens, args.max_tokens or p.max_tokens) for p in FIVE_PROMPTS)
    else:
        chats = free_chats(tokenizer, args.chats)
        caps = (args.max_tokens or 48,) * len(chats)
    return Work(tokenizer, chats, caps, documents, min(2, len(documents)), whole), windows


def main(argv: Sequence[str] | None = None) -> None:
    parser = values.parser(__doc__)
    parser.add_argument("model", type=values.folder, nargs="?", metavar="MODEL", help="left out: the bundled model")
    parser.add_argument("--builds", type=Path, metavar="DIR", help="make builds here, and keep them")
    parser.add_argument("--fp8-from", metavar="SOURCE", help="FP8 checkpoint to take dense matrices from")
    shapes = [*sorted(n for n, s in SHAPES.items() if s.moe), TINY]
    parser.add_argument("--shape", choices=shapes, help="no model: a shape; tiny needs no GPU")
    parser.add_argument("--weights", choices=("random",), help="said with --shape: its weights mean nothing")
    parser.add_argument("--force-acceptance", type=values.shares, metavar="A,A", help="with --shape; 0.9,0.8")
    parser.add_argument("--layers", type=values.count, help="with --shape: the first layers, nothing recorded")
    parser.add_argument("--prompt", type=values.count, help="with --shape: tokens before the answer; 128")
    parser.add_argument(
        "--drafts", type=values.draft_lengths, default=(1, 2, 3), metavar="K,K", help="of the MTP rungs"
    )
    parser.add_argument("--rate", type=values.share, default=RATE, help="of compressed documents")
    parser.add_argument(
        "--rungs", type=values.counts, metavar="N,N", help="these alone, the lowest above 1 as a partner only"
    )
    parser.add_argument("--repeats", type=values.count, default=3)
    parser.add_argument("--protocol", choices=("chats", "five-prompts"), default="chats")
    parser.add_argument("--chats", type=values.count, default=4, help="answers of a pass")
    parser.add_argument("--max-tokens", type=values.count, help="of each; 48, and the protocol's own")
    parser.add_argument("--document", type=values.count, default=1024, help="tokens of a document")
    parser.add_argument("--items", type=values.count, default=8, help="numbers to find, a document each")
    parser.add_argument(
        "--text", type=values.file, nargs="+", default=[HELDOUT], metavar="FILE", help="texts to predict"
    )
    parser.add_argument("--window", type=values.count, default=512, help="tokens of a window")
    parser.add_argument("--windows", type=values.count, default=10, help="at most so many")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--commit", help="the commit, where the checkout is not at hand")
    parser.add_argument("--out", type=values.output, default=Path("results/ladder.jsonl"))
    args = parser.parse_args(argv)
    if args.rate == 0:
        parser.error("argument --rate: must be above 0")
    try:
        records = list(recorded(args, parser))
    except CheckFailed as e:
        print(f"onebox: ladder check failed: {e}", file=sys.stderr)
        sys.exit(FAILED)
    print("\n".join(lines(records)))


def recorded(args: argparse.Namespace, parser: argparse.ArgumentParser) -> Iterator[dict[str, Any]]:
    """Records, each appended to the file as soon as it is there."""

    def heard(name: str) -> None:
        print(f"rung {name}", file=sys.stderr, flush=True)

    if args.shape is not None:
        if args.model is not None:
            parser.error("MODEL and --shape: name one of them")
        if args.shape != TINY and not torch.cuda.is_available():
            parser.error(
                f"--shape {args.shape} needs a CUDA device, and none is visible; --shape {TINY} and a checkpoint's "
                "ladder run on a CPU"
            )
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        forced = args.force_acceptance or (0.9, 0.8, 0.7)
        made = climb_shape(
            args.shape, args.drafts, forced, prompt=args.prompt or 128, repeats=args.repeats, layers=args.layers,
            heard=heard,
        )  # fmt: skip
        for record in made:
            record |= environment(device, args.commit)
            if args.layers is None:
                append(args.out, record)
            yield record
        return
    for flag in ("weights", "force_acceptance", "layers", "prompt"):
        if getattr(args, flag) is not None:
            parser.error(f"--{flag.replace('_', '-')} goes with --shape")
    base = args.model or Path(bundled_model())
    packed = is_packed(base)
    spec = Spec.from_config(config_of(base))
    if packed and (args.fp8_from or args.builds):
        flag = "--fp8-from" if args.fp8_from else "--builds"
        parser.error(f"{flag} is for builds of a 16-bit MODEL; {base.name} is packed already")
    room = spec.max_positions - 512
    if args.document > room:
        parser.error(f"argument --document: {base.name} reads {spec.max_positions} tokens; {room} at most")
    rungs = techniques(packed, args.drafts, args.rate, mtp=bool(spec.n_mtp_layers), kv=("fp8", "tq4"))
    if args.rungs is not None:
        if max(args.rungs) > len(rungs):
            parser.error(f"argument --rungs: there are {len(rungs)}: {', '.join(r.name for r in rungs)}")
        rungs = tuple(rungs[n - 1] for n in sorted(set(args.rungs)))
    if packed:
        print(f"{base.name} is packed already: weight formats are left out; name its 16-bit original", file=sys.stderr)
    work, windows = work_of(base, args)
    with build_folder(args.builds) as folder:
        first = min(args.rungs or (1,))
        tall = Ladder(
            base, work, rungs, windows, folder, args.device, args.document, args.repeats, args.fp8_from, first
        )
        for record in tall.climb(heard):
            record |= environment(torch.device(record_device(args.device)), args.commit)
            append(args.out, record)
            yield record


def config_of(base: Path) -> dict[str, Any]:
    from onebox.checkpoint.reader import WeightReader

    return WeightReader.open(base).config


def record_device(device: str) -> str:
    return EngineConfig("", device=device).resolve_device(cuda_devices=torch.cuda.device_count()).device


if __name__ == "__main__":
    main()
