"""Ours against the reference package and simple baselines: what survives, how well budgets are met, how long it takes.

    python -m tools.compare_llmlingua run DATA --model MODEL --reference PYTHON --sets nq20 --n 30 --items items.jsonl
    python -m tools.compare_llmlingua table items.jsonl --out results/prompt_compare.jsonl

`run` keeps one worker a side and asks them one after the other for the same case, so both see the same machine. Every
answer's figures are a line of the items file; a repeated run adds only what is missing. `table` makes the rows.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onebox.bench import record
from onebox.prompt.budget import counter_of
from tools.compare_llmlingua import cases as sets
from tools.compare_llmlingua.baselines import BASELINES

RATIOS = (2, 4, 8)
# side, method, whether it is asked the question; neighbours are timed against each other
METHODS: dict[str, tuple[str, str, bool]] = {
    "reference LongLLMLingua": ("reference", "longllmlingua", True),
    "ours longllmlingua": ("ours", "longllmlingua", True),
    "reference LLMLingua": ("reference", "llmlingua", False),
    "ours llmlingua, question": ("ours", "llmlingua", True),
    "ours llmlingua": ("ours", "llmlingua", False),
    "ours longllmlingua, BM25": ("ours", "longllmlingua, BM25", True),
    "ours auto": ("ours", "auto", True),
    "ours auto, no question": ("ours", "auto", False),
    "BM25 documents": ("baseline", "BM25 documents", True),
    "BM25 sentences": ("baseline", "BM25 sentences", True),
    "BM25 sentences, no question": ("baseline", "BM25 sentences", False),
    "truncation": ("baseline", "truncation", False),
    "random words": ("baseline", "random words", False),
}


class Worker:
    """A process that answers one JSON line with one JSON line."""

    def __init__(self, command: Sequence[str], threads: int):
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
        environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.process = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8", env=environment
        )
        self.versions: dict[str, str] = self._read()["versions"]

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(map(str, self.process.args))}: ended with {self.process.wait()}")  # type: ignore[arg-type]
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, **job: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return self._read()

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@dataclass(frozen=True)
class Sides:
    """What answers for each method; without a worker a side's methods are skipped."""

    ours: Worker | None
    reference: Worker | None
    count: sets.Count

    def answer(self, method: str, case: sets.Case, target: int) -> dict[str, Any]:
        side, name, asked = METHODS[method]
        question = case.question if asked else None
        if side == "baseline":
            started, cpu = time.perf_counter(), time.process_time()
            text = BASELINES[name](case.documents, question, target, self.count)
            took = {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - cpu}
            return {"text": text, **took}
        worker = self.ours if side == "ours" else self.reference
        assert worker is not None
        return worker.ask(method=name, documents=case.documents, question=question, target=target)


def measure(
    sides: Sides, name: str, chosen: Sequence[sets.Case], methods: Sequence[str], done: set[tuple[str, str, int]]
) -> Any:
    """Yields one item for each (case, ratio, method) that is not done; who goes first alternates by case."""
    for index, case in enumerate(chosen):
        total = sides.count(case.text)
        for ratio in RATIOS:
            for method in methods if index % 2 == 0 else list(methods)[::-1]:
                if (case.name, method, ratio) in done:
                    continue
                target = total // ratio
                answer = sides.answer(method, case, target)
                item = {"set": name, "case": case.name, "method": method, "ratio": ratio, "tokens": total}
                if "error" in answer:
                    yield {**item, "error": answer["error"]}
                    continue
                text = answer["text"]
                yield {
                    **item,
                    "recall": round(sets.recall(case, text), 4),
                    "whole": round(sets.whole(case, text), 4),
                    "broken": round(sets.broken(case, text), 4),
                    "budget_error": round(sides.count(text) / target - 1, 4),
                    "seconds": round(answer["seconds"], 4),
                    "cpu_seconds": round(answer["cpu_seconds"], 4),
                }


def rows(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each (set, method, ratio). `speedup`: the reference's median seconds over this method's, on the cases
    that both have done."""
    groups: dict[tuple[str, str, int], dict[str, dict[str, Any]]] = {}
    for item in items:
        groups.setdefault((item["set"], item["method"], item["ratio"]), {})[item["case"]] = item
    order = {method: at for at, method in enumerate(METHODS)}
    found = []
    for (name, method, ratio), group in sorted(groups.items(), key=lambda g: (g[0][0], order[g[0][1]], g[0][2])):
        good = [item for item in group.values() if "error" not in item]
        row: dict[str, Any] = {"bench": "prompt_compare", "set": name, "method": method, "ratio": ratio}
        row |= {"n": len(group), "failed": len(group) - len(good)}
        if good:
            mean = lambda key, of=good: round(statistics.fmean(item[key] for item in of), 4)  # noqa: E731
            errors = [item["budget_error"] for item in good]
            row |= {"recall": mean("recall"), "whole": mean("whole"), "broken": mean("broken")}
            row |= {
                "budget_error": mean("budget_error"),
                "budget_error_abs": round(statistics.fmean(map(abs, errors)), 4),
                "budget_error_min": min(errors),
                "budget_error_max": max(errors),
            }
            seconds = [item["seconds"] for item in good]
            row |= {"median_s": record.rounded(statistics.median(seconds)), "total_s": record.rounded(sum(seconds))}
            row |= {"median_cpu_s": record.rounded(statistics.median(item["cpu_seconds"] for item in good))}
            for against in ("reference LongLLMLingua", "reference LLMLingua"):
                other = groups.get((name, against, ratio), {})
                both = [
                    case for case, item in group.items() if "error" not in {**item, **other.get(case, {"error": 1})}
                ]
                if both and method.startswith("ours"):
                    key = "speedup_long" if "Long" in against else "speedup_llmlingua"
                    for suffix, unit in (("", "seconds"), ("_cpu", "cpu_seconds")):
                        theirs = statistics.median(other[case][unit] for case in both)
                        own = statistics.median(group[case][unit] for case in both)
                        row[key + suffix] = record.rounded(theirs / max(own, 1e-9), 3)
        found.append(row)
    return found


def read_items(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Items, and the environment of the last run that wrote to the file."""
    items: list[dict[str, Any]] = []
    environment: dict[str, Any] = {}
    if path.exists():
        for line in path.read_text("utf-8").splitlines():
            found = json.loads(line)
            if "environment" in found:
                environment = found["environment"]
            else:
                items.append(found)
    return items, environment


def run(options: argparse.Namespace) -> None:
    import torch
    from tokenizers import Tokenizer

    model = options.model or "none"
    known = read_items(options.items)[0]
    done = {(item["case"], item["method"], item["ratio"]) for item in known}
    worker_options = [str(model), options.dtype, str(options.threads)]
    ours = Worker([sys.executable, "-m", "tools.compare_llmlingua.ours", *worker_options], options.threads)
    reference = None
    if options.reference:
        script = Path(__file__).parent / "reference.py"
        reference = Worker([options.reference, str(script), *worker_options], options.threads)
    count = counter_of(Tokenizer.from_file(str(options.model / "tokenizer.json")) if options.model else None)
    sides = Sides(ours, reference, count)
    methods = [method for method in METHODS if method in (options.methods or METHODS)]
    if reference is None:
        methods = [method for method in methods if METHODS[method][0] != "reference"]
    if options.model is None:
        methods = [method for method in methods if "lingua" not in method]
    environment = record.environment(torch.device("cpu"), options.commit)
    environment["device"] += f", {options.threads} threads"
    environment["versions"] |= {f"ours {k}": v for k, v in ours.versions.items()}
    environment["versions"] |= {f"reference {k}": v for k, v in (reference.versions if reference else {}).items()}
    environment |= {"dtype": options.dtype}
    record.append(options.items, {"environment": environment})
    try:
        for name in options.sets:
            chosen = sets.load(name, options.data, options.n, count, options.window)
            for item in measure(sides, name, chosen, methods, done):
                record.append(options.items, item)
                print(json.dumps(item), flush=True)
    finally:
        ours.close()
        if reference is not None:
            reference.close()


def table(options: argparse.Namespace) -> None:
    items, environment = read_items(options.items)
    found = rows(items)
    if options.out:
        options.out.unlink(missing_ok=True)
        for row in found:
            record.append(options.out, {**row, **environment})
    for name in dict.fromkeys(row["set"] for row in found):
        print(f"\n{name}\n\n{markdown([row for row in found if row['set'] == name])}")


def markdown(found: Sequence[dict[str, Any]]) -> str:
    """One line a method, one column a ratio: recall; then budget error at worst, damage and seconds over all ratios."""
    head = "| method | n | 2x | 4x | 8x | whole at 4x | broken words | largest budget error | seconds at 4x |"
    out = [head, "|" + "---|" * 9]
    for method in dict.fromkeys(row["method"] for row in found):
        by = {row["ratio"]: row for row in found if row["method"] == method and "recall" in row}
        if not by:
            continue
        show: Callable[[int, str, str], str] = lambda ratio, key, form, by=by: (  # type: ignore[misc]  # noqa: E731
            format(by[ratio][key], form) if ratio in by else "-"
        )
        worst = max((by[r][key] for r in by for key in ("budget_error_min", "budget_error_max")), key=abs)
        damage = statistics.fmean(row["broken"] for row in by.values())
        cells = [method, str(max(row["n"] for row in by.values())), *[show(r, "recall", ".2f") for r in RATIOS]]
        cells += [show(4, "whole", ".2f"), f"{damage:.1%}", f"{worst:+.1%}", show(4, "median_s", ".3g")]
        out.append("| " + " | ".join(cells) + " |")
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    verbs = parser.add_subparsers(required=True)
    verb = verbs.add_parser("run", help="compress, measure, add to the items file")
    verb.add_argument("data", type=Path)
    verb.add_argument("--model", type=Path, help="transformers folder; left out: methods without a model")
    verb.add_argument("--reference", help="python of the environment that has llmlingua; left out: ours alone")
    verb.add_argument("--sets", nargs="+", default=["nq10", "nq20", "qmsum", "gsm8k"])
    verb.add_argument("--methods", nargs="+", choices=list(METHODS))
    verb.add_argument("--n", type=int, default=30, help="cases of each set")
    verb.add_argument("--window", type=int, default=2000, help="tokens of a meeting around the evidence")
    verb.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    verb.add_argument("--threads", type=int, default=2)
    verb.add_argument("--items", type=Path, required=True)
    verb.add_argument("--commit", help="of a copy without git")
    verb.set_defaults(function=run)
    verb = verbs.add_parser("table", help="rows and markdown from an items file")
    verb.add_argument("items", type=Path)
    verb.add_argument("--out", type=Path)
    verb.set_defaults(function=table)
    options = parser.parse_args()
    options.function(options)


if __name__ == "__main__":
    main()
