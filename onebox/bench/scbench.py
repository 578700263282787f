"""SCBench: several questions about one long context, in one conversation or as requests of their own.

    onebox bench scbench                                        # the bundled model, made contexts of 1,000 tokens
    onebox bench scbench MODEL --prefix-cache on,off --length 32000 --sessions 10
    onebox bench scbench MODEL --data microsoft/SCBench --tasks scbench_kv,scbench_vt
    onebox bench scbench --url http://127.0.0.1:8000 --length 8000

Quality stands beside what it cost: prompt tokens that a cache gave, time to the first token of the first and of later
questions, bytes kept between them. A comma in an engine option runs every value and says whether answers changed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from onebox.bench import values
from onebox.bench.record import aligned, append, environment, rounded
from onebox.bench.scbench_data import HUB, folder_of, sessions
from onebox.bench.scbench_synthetic import make
from onebox.bench.scbench_tasks import TASKS, Functions, Session, asked_functions, mean_by_kind, score
from onebox.bench.subjects import EngineSubject, Message, Reply, Subject, UrlSubject
from onebox.checkpoint.reader import WeightReader
from onebox.config import EngineConfig, bundled_model
from onebox.engine.engine import Engine
from onebox.errors import ConfigError
from onebox.model.sparse import read_table
from onebox.prompt.command import build_compressor
from onebox.prompt.compressor import Compressor
from onebox.server.chat import Tokenizer
from onebox.spec import Spec

MODES = ("multi-turn", "multi-request")
MAX_CONTEXT = 131_072  # tokens, where the subject does not say: the paper's
MARGIN = 64  # tokens of a chat template around a question and its answer
COMPRESSION = ("none", "auto", "llmlingua", "longllmlingua", "llmlingua2")


@dataclass(frozen=True)
class Answered:
    """One question of a session, its answer and its score. `turn` counts from 0."""

    session: str
    turn: int
    kind: str
    reply: Reply
    score: float
    gold: str


@dataclass(frozen=True)
class Played:
    """One session. `held` is what it left in the subject's cache, in bytes, where that is known."""

    answers: tuple[Answered, ...]
    held: int | None


def play(subject: Subject, session: Session, mode: str, functions: Functions, *, own_answers: bool = False) -> Played:
    """Ask a session's questions.

    multi-turn: one conversation; what the model said before is replaced by the right answer, as in the paper, unless
    `own_answers`. multi-request: each question anew behind the same context.
    """
    before = subject.held_bytes()
    history: list[Message] = []
    answers = []
    for i, turn in enumerate(session.turns):
        if mode == "multi-request" or not history:
            history = [{"role": "user", "content": session.opening(turn.question)}]
        else:
            history.append({"role": "user", "content": turn.question})
        reply = subject.ask(history, turn.max_tokens)
        history.append({"role": "assistant", "content": reply.text if own_answers else turn.gold})
        answers.append(
            Answered(session.id, i, turn.task, reply, score(reply.text, turn, session, functions), turn.gold)
        )
    after = subject.held_bytes()
    return Played(tuple(answers), None if after is None or before is None else max(after - before, 0))


def summary(played: Sequence[Played]) -> dict[str, Any]:
    """A task's figures: score by kind and by turn, cached share, first-token times, bytes held (means a session)."""
    answers = [a for p in played for a in p.answers]
    later = [a for a in answers if a.turn]
    kinds = mean_by_kind([(a.kind, a.score) for a in answers])
    turns = range(max(a.turn for a in answers) + 1)
    held = [p.held for p in played if p.held is not None]

    def median_ms(some: Sequence[Answered]) -> float | None:
        return rounded(1e3 * statistics.median(a.reply.ttft_s for a in some)) if some else None

    return {
        "score": rounded(statistics.mean(kinds.values())),
        **({"by_kind": {k: rounded(v) for k, v in kinds.items()}} if len(kinds) > 1 else {}),
        "by_turn": [rounded(statistics.mean(a.score for a in answers if a.turn == i)) for i in turns],
        "sessions": len(played),
        "questions": len(answers),
        "prompt_tokens": round(statistics.mean(a.reply.prompt_tokens for a in answers)),
        "later_cached_share": rounded(
            sum(a.reply.cached_tokens for a in later) / sum(a.reply.prompt_tokens for a in later), 3
        )
        if later
        else None,
        "first_ttft_ms": median_ms([a for a in answers if not a.turn]),
        "later_ttft_ms": median_ms(later),
        "held_bytes": round(statistics.mean(held)) if held else None,
    }


def fitted(session: Session, tokenizer: Tokenizer, max_context: int) -> Session:
    """The middle of a context left out where it and all turns do not fit, as in the paper. Raises ConfigError."""
    others = sum(
        len(tokenizer.encode(turn.question)) + max(turn.max_tokens, len(tokenizer.encode(turn.gold))) + MARGIN
        for turn in session.turns
    )
    room = max_context - others - len(tokenizer.encode(session.opening(""))) + len(tokenizer.encode(session.context))
    ids = tokenizer.encode(session.context)
    if len(ids) <= room:
        return session
    if room < 2:
        raise ConfigError(
            f"{session.task}: the questions alone take {others} of {max_context} tokens; ask fewer with --turns."
        )
    half = room // 2
    return replace(session, context=tokenizer.decode(ids[:half]) + tokenizer.decode(ids[len(ids) - half :]))


def compressed(session: Session, compress: Callable[[str], str]) -> Session:
    """The context shortened before any question is known."""
    return replace(session, context=compress(session.context.replace("<|endoftext|>", "")))


def compressor(method: str, model: str | None, rate: float, tokenizer: Tokenizer) -> Callable[[str], str]:
    """Context -> shorter context; question marks stay, as in the paper. Raises PromptError, ConfigError."""
    if not 0 < rate <= 1:
        raise ConfigError(f"--compress-rate must be above 0 and at most 1, got {rate}.")
    scorer = build_compressor(method, model).scorer
    made = Compressor(method, scorer=scorer, force_tokens=("?",))  # type: ignore[arg-type]  # COMPRESSION's names
    return lambda text: made.compress(text, rate=rate, tokenizer=lambda t: len(tokenizer.encode(t))).text


# ---- what is varied -------------------------------------------------------------------------------------------------


def engine_values(field_name: str, text: str) -> list[Any]:
    """Comma-separated values of a field of EngineConfig, as its type. Raises ConfigError."""
    types = {f.name: str(f.type) for f in fields(EngineConfig)}
    if field_name not in types or field_name == "model":
        known = ", ".join(sorted(set(types) - {"model"}))
        raise ConfigError(f"this engine has no option {field_name!r}. Known: {known}.")
    kind, found = types[field_name], []
    for word in text.split(","):
        try:
            if "bool" in kind:
                value: Any = {"on": True, "true": True, "off": False, "false": False}[word]
            elif "int" in kind:
                value = int(word)
            elif "float" in kind:
                value = float(word)
            else:
                value = word
        except (KeyError, ValueError) as e:
            raise ConfigError(f"{field_name}: {word!r} is not {kind}.") from e
        found.append(value)
    return found


def variants(options: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Every combination; the first value of each first."""
    for chosen in itertools.product(*options.values()):
        yield dict(zip(options, chosen, strict=True))


def shown(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


# ---- the command ----------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    p = values.parser(__doc__)
    p.add_argument("model", nargs="?", help="checkpoint folder for an engine here; left out: the bundled model")
    p.add_argument("--url", help="ask this OpenAI-compatible server in place of an engine")
    p.add_argument("--served-model", metavar="NAME", help="its model; left out: the first it lists")
    p.add_argument("--api-key", default="none")
    p.add_argument(
        "--tokenizer", type=values.folder, metavar="FOLDER", help="counts tokens with --url; else the bundled one"
    )
    p.add_argument("--tasks", default="all", help="names with commas, with or without scbench_; or all")
    p.add_argument("--modes", default=",".join(MODES), help="multi-turn, multi-request, or both with a comma")
    p.add_argument("--data", metavar="FOLDER|ID", help=f"the published data: its folder, or its id ({HUB})")
    p.add_argument("--revision", help="commit of the hub's data set")
    p.add_argument("--length", type=values.count, default=1000, help="tokens of a made context")
    p.add_argument("--seed", type=values.count_or_none, default=0, help="of made contexts")
    p.add_argument("--sessions", type=values.count, help="contexts a task; made: 2, published: all")
    p.add_argument("--turns", type=values.count, default=5, help="questions a context at most")
    p.add_argument("--max-context", type=values.count, help="cut longer contexts in the middle; its own limit")
    p.add_argument("--own-answers", action="store_true", help="go on from what the model said, not from right answers")
    p.add_argument("--prefix-cache", metavar="on,off", help="engine: with a prefix cache, without, both")
    p.add_argument("--kv-cache-dtype", metavar="A,B", help="engine: formats of KV pages")
    p.add_argument("--prefill-attention", metavar="A,B", help="engine: dense, minference, auto")
    p.add_argument("--sparse-from", type=values.count_or_none, metavar="N", help="tokens below which it is dense")
    p.add_argument("--sparse-table", metavar="FILE", help="patterns a head, of onebox bench sparse-search")
    p.add_argument("--engine", action="append", default=[], metavar="FIELD=A,B", help="engine: any other option")
    p.add_argument("--device", default="auto")
    p.add_argument("--compress", default="none", help=f"shorten contexts: {', '.join(COMPRESSION)}; several: commas")
    p.add_argument("--compress-model", metavar="FOLDER|ID", help="scorer of the methods other than auto")
    p.add_argument("--compress-rate", type=values.positive, default=1 / 3, help="kept share of a context")
    p.add_argument("--answers", type=values.output, metavar="FILE", help="write every question's answer and score")
    p.add_argument("--commit", help="the commit, where the checkout is not at hand")
    p.add_argument("--out", type=values.output, help="file to append result lines to")
    return p


def names(text: str, known: Sequence[str], what: str, *, prefix: str = "") -> list[str]:
    """Comma-separated names, `all` for all. Raises ConfigError."""
    if text == "all":
        return list(known)
    found = [n if n in known else prefix + n for n in text.split(",") if n]
    if not found or not set(found) <= set(known):
        bad = next((n for n in found if n not in known), text)
        raise ConfigError(f"{what} {bad.removeprefix(prefix)!r} is not known. Known: {', '.join(known)}.")
    return found


def engine_options(args: argparse.Namespace) -> dict[str, list[Any]]:
    """Field of EngineConfig -> values to run. Raises ConfigError."""
    asked = [("kv_cache_dtype", args.kv_cache_dtype), ("prefill_attention", args.prefill_attention)]
    for text in args.engine:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--engine {text!r} must be FIELD=VALUE.")
        asked.append((name, value))
    asked.append(("prefix_caching", args.prefix_cache))  # last: one after the other, so that answers are compared
    given = {name: value for name, value in asked if value is not None}
    sparse = {"--sparse-from": args.sparse_from, "--sparse-table": args.sparse_table}
    if args.url and (given or any(v is not None for v in sparse.values())):
        raise ConfigError(
            f"{', '.join(given) or 'sparse prefill'}: options of an engine here; the server at --url has its own."
        )
    if "prefill_attention" not in given and (alone := next((k for k, v in sparse.items() if v is not None), None)):
        raise ConfigError(f"{alone} goes with --prefill-attention minference or auto.")
    return {name: engine_values(name, value) for name, value in given.items()}


def load(args: argparse.Namespace, tasks: list[str], tokenizer: Tokenizer) -> dict[str, list[Session]]:
    """Sessions by task. Raises ConfigError."""
    if args.data:
        folder = folder_of(args.data, tuple(tasks), revision=args.revision)
        return {task: sessions(folder, task, most=args.sessions, turns=args.turns) for task in tasks}

    def count(text: str) -> int:
        return len(tokenizer.encode(text))

    n = 2 if args.sessions is None else args.sessions
    return {
        task: [make(task, args.length, args.turns, count, seed=args.seed, index=i) for i in range(n)] for task in tasks
    }


def configs(args: argparse.Namespace, model: str) -> list[tuple[dict[str, Any], EngineConfig]]:
    """What is varied, and the engine's config for each. Raises ConfigError."""
    if args.sparse_table is not None:
        read_table(Path(args.sparse_table), Spec.from_config(WeightReader.open(Path(model)).config))
    found = []
    for chosen in variants(engine_options(args)):
        more: dict[str, Any] = {"max_num_seqs": 1} | chosen
        if chosen.get("prefill_attention", "dense") != "dense":
            more |= {"sparse_from": args.sparse_from, "sparse_table": args.sparse_table}
        found.append((chosen, EngineConfig(model=model, device=args.device, **more)))
    return found


def subjects(args: argparse.Namespace, model: str, tokenizer: Tokenizer) -> Iterator[tuple[dict[str, Any], Subject]]:
    """Each variant of the engine with what was varied, one alive at a time; or the server."""
    if args.url:
        yield {}, UrlSubject(args.url, model=args.served_model, api_key=args.api_key)
        return
    for chosen, config in configs(args, model):
        yield chosen, EngineSubject(Engine(config), tokenizer, Path(model).name)


def main(argv: Sequence[str] | None = None) -> None:
    p = parser()
    args = p.parse_args(argv)
    if args.url and args.model:
        p.error(f"--url asks a server; leave {args.model!r} out, or name its model with --served-model")
    tasks = names(args.tasks, TASKS, "task", prefix="scbench_")
    modes = names(args.modes, MODES, "mode")
    methods = names(args.compress, COMPRESSION, "compression")
    model = args.model or bundled_model()
    tokenizer = Tokenizer.from_folder(args.tokenizer or model)
    engine_options(args) if args.url else configs(args, model)  # a mistake there is found before contexts are made
    shorten = {
        m: compressor(m, args.compress_model, args.compress_rate, tokenizer) if m != "none" else None for m in methods
    }
    loaded = load(args, tasks, tokenizer)
    functions = asked_functions(s for group in loaded.values() for s in group)
    first: dict[tuple[str, ...], list[str]] = {}
    table = [["task", "mode", "with", "score", "by turn", "cached", "TTFT 1 ms", "TTFT 2+ ms", "held MB", "as first"]]
    for chosen, subject in subjects(args, model, tokenizer):
        limit = args.max_context or subject.max_context or MAX_CONTEXT
        for method, shorter in shorten.items():
            options = chosen | ({"compress": method} if len(methods) > 1 or method != "none" else {})
            for task, mode in itertools.product(tasks, modes):
                group = [fitted(compressed(s, shorter) if shorter else s, tokenizer, limit) for s in loaded[task]]
                played = [play(subject, s, mode, functions, own_answers=args.own_answers) for s in group]
                said = [a.reply.text for q in played for a in q.answers]
                same = said == first.setdefault((task, mode), said)
                cache: dict[str, Any] = {}
                if "prefix_caching" in options:
                    others = repr({k: v for k, v in options.items() if k != "prefix_caching"})
                    cache["same_with_and_without_cache"] = said == first.setdefault((task, mode, others), said)
                found = summary(played)
                record: dict[str, Any] = {"bench": "scbench", "model": subject.name, "task": task, "mode": mode}
                record |= {"options": {k: shown(v) for k, v in options.items()}}
                record |= {"data": Path(args.data).name if args.data else "made", "length": args.length}
                if args.data:
                    del record["length"]
                if chosen.get("prefill_attention", "dense") != "dense":
                    table_name = Path(args.sparse_table).name if args.sparse_table else None
                    record |= {"sparse_from": args.sparse_from, "sparse_table": table_name}
                record |= found | {"same_answers": same} | cache
                table.append(row_of(task, mode, options, found, same))
                print("  ".join(table[-1]), file=sys.stderr, flush=True)
                if args.out:
                    device = torch.device(args.device if args.device.startswith("cuda") else "cpu")
                    append(args.out, record | environment(device, args.commit))
                if args.answers:
                    write_answers(args.answers, record, played)
        del subject  # before the next engine takes its memory
    print("\n".join(aligned(table)))


def row_of(task: str, mode: str, options: Mapping[str, Any], found: Mapping[str, Any], same: bool) -> list[str]:
    def number(value: float | None, scale: float = 1.0, form: str = ".0f") -> str:
        return "-" if value is None else format(value * scale, form)

    return [
        task.removeprefix("scbench_"),
        mode,
        " ".join(f"{k}={shown(v)}" for k, v in options.items()) or "-",
        f"{found['score']:.3f}",
        " ".join(f"{s:.2f}" for s in found["by_turn"]),
        number(found["later_cached_share"], 100, ".0f") + ("%" if found["later_cached_share"] is not None else ""),
        number(found["first_ttft_ms"]),
        number(found["later_ttft_ms"]),
        number(found["held_bytes"], 1e-6, ".1f"),
        "yes" if same else "no",
    ]


def write_answers(file: Path, record: Mapping[str, Any], played: Sequence[Played]) -> None:
    """One line a question."""
    with file.open("a", encoding="utf-8") as out:
        for a in (a for p in played for a in p.answers):
            row = {k: record[k] for k in ("task", "mode", "options")} | {"session": a.session, "turn": a.turn}
            row |= {"kind": a.kind, "gold": a.gold, "said": a.reply.text, "score": a.score}
            out.write(json.dumps(row, ensure_ascii=False) + "\n")
