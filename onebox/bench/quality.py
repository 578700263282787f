"""Quality of builds against a reference: KL, top-1 agreement, perplexity, needle recall, and how
many drafts a model's own head lands.

    python -m onebox.bench.quality REFERENCE BUILD... --text FILE [--needles N] [--out results/quality.jsonl]

FILE holds one JSON object with a `text` a line.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from onebox.bench.record import append, environment, rounded
from onebox.model.load import load_model
from onebox.model.qwen3_5 import Qwen35
from onebox.model.sequence import Sequences

DRAFTS = 3


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


def next_token_logits(model: Qwen35, tokens: Tensor) -> Tensor:
    """tokens [T] -> fp32 logits [T, V] of one fresh sequence."""
    return model.logits(Sequences(model, 1, len(tokens)).forward(tokens[None])[0])


def agreement(reference: Qwen35, build: Qwen35, windows: Sequence[Tensor]) -> Agreement:
    """Over token windows [T] each: every position but the last predicts its successor."""
    kl = same = loss = reference_loss = 0.0
    count = 0
    for tokens in windows:
        ours, theirs = (next_token_logits(m, tokens)[:-1].log_softmax(-1) for m in (build, reference))
        kl += float((theirs.exp() * (theirs - ours)).sum())
        same += float((ours.argmax(-1) == theirs.argmax(-1)).sum())
        target = tokens[1:, None]
        loss -= float(ours.gather(-1, target).sum())
        reference_loss -= float(theirs.gather(-1, target).sum())
        count += len(tokens) - 1
    return Agreement(kl / count, same / count, math.exp(loss / count), math.exp(reference_loss / count), count)


def greedy(model: Qwen35, prompts: Tensor, n_new: int) -> tuple[Tensor, Tensor]:
    """prompts [n, T] -> tokens [n, T + n_new] and hidden states [n, T + n_new - 1, H]."""
    run = Sequences(model, len(prompts), prompts.shape[1] + n_new)
    tokens, hidden = prompts, [run.forward(prompts)]
    for _ in range(n_new - 1):
        best = model.logits(hidden[-1][:, -1]).argmax(-1, keepdim=True)
        tokens = torch.cat((tokens, best), dim=1)
        hidden.append(run.forward(best))
    best = model.logits(hidden[-1][:, -1]).argmax(-1, keepdim=True)
    return torch.cat((tokens, best), dim=1), torch.cat(hidden, dim=1)


def acceptance(model: Qwen35, prompts: Tensor, n_new: int = 64, drafts: int = DRAFTS) -> Acceptance:
    """Draft along the model's own greedy continuations of prompts [n, T], step by step as speculation would."""
    tokens, hidden = greedy(model, prompts, n_new)
    reached, steps = [0] * drafts, 0
    for row, states in zip(tokens, hidden, strict=True):
        run = Sequences(model, 1, len(row) + drafts)
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


def needle_recall(model: Qwen35, tokenizer: Tokenizer, texts: Sequence[str], n: int, length: int) -> float:
    """Share of `n` six-digit numbers, hidden at even depths of `length` tokens of text, that a greedy answer gives."""
    rng, found = random.Random(0), 0
    question = "What is the special magic number mentioned in the text?"
    for i in range(n):
        number = str(rng.randrange(100_000, 1_000_000))
        body = tokenizer.decode(tokenizer.encode(texts[i % len(texts)]).ids[:length])
        at = body.find(" ", int(len(body) * i / max(n - 1, 1) * 0.98))
        body = f"{body[:at]} The special magic number is {number}.{body[at:]}"
        prompt = f"<|im_start|>user\n{body}\n\n{question}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        ids = torch.tensor(tokenizer.encode(prompt).ids, device=model.device)
        tokens, _ = greedy(model, ids[None], 10)
        found += number in tokenizer.decode(tokens[0, len(ids) :].tolist())
    return found / n


def read_texts(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines() if line]


def tokenizer_of(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def windows_of(tokenizer: Tokenizer, texts: Sequence[str], length: int) -> list[Tensor]:
    """One window of at most `length` tokens of each text."""
    return [torch.tensor(tokenizer.encode(text).ids[:length]) for text in texts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reference", type=Path)
    parser.add_argument("builds", type=Path, nargs="+")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--needles", type=int, default=0, help="numbers to find in chat prompts of --window tokens")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with torch.inference_mode():
        reference = load_model(args.reference, device=args.device).model
        tokenizer, texts = tokenizer_of(args.reference), read_texts(args.text)
        windows = [w.to(args.device) for w in windows_of(tokenizer, texts, args.window)]
        prompts = torch.stack([w[: args.prompt_tokens] for w in windows if len(w) >= args.prompt_tokens])
        for path in args.builds:
            loaded = load_model(path, device=args.device)
            score = agreement(reference, loaded.model, windows)
            record = {"bench": "quality", "model": args.reference.name, "build": path.name}
            record |= {k: rounded(v) for k, v in asdict(score).items()}
            record["weight_bytes"] = sum(loaded.report.formats.values())
            line = f"{path.name:20} KL {score.kl:.4f}  top-1 {score.top1:.4f}  ppl {score.perplexity:.3f}"
            line += f" (reference {score.reference_perplexity:.3f})"
            if loaded.model.mtp is not None:
                drafted = acceptance(loaded.model, prompts, args.new_tokens)
                record |= {"reach": [rounded(r) for r in drafted.reach], "steps": drafted.steps}
                line += "  drafts " + " / ".join(f"{r:.3f}" for r in drafted.reach)
            if args.needles:
                recall = needle_recall(loaded.model, tokenizer, texts, args.needles, args.window)
                record |= {"needle_recall": recall, "needles": args.needles}
                line += f"  needles {recall:.3f}"
            print(line, flush=True)
            if args.out:
                append(args.out, {**record, **environment(torch.device(args.device))})


if __name__ == "__main__":
    main()
