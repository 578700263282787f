"""Greedy chat answers of a build through the engine: how many are right, and how many drafts were kept.

    python -m onebox.bench.chat MODEL... --questions FILE.jsonl --n 20          # acceptance on real questions
    python -m onebox.bench.chat MODEL... --key-values 512 1024 2048 4096        # recall of a 6-digit number in data

FILE has a JSON object with `question` a line. Key-value items are made from a seed: a JSON object of random names and
numbers that fills the given number of tokens, the one asked for at evenly spread depths.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from onebox.bench import values
from onebox.bench.record import append, environment, rounded
from onebox.config import EngineConfig
from onebox.engine.engine import Engine
from onebox.errors import ConfigError
from onebox.request import Request, SamplingParams
from onebox.server.chat import Tokenizer

NAMES = "amber birch cedar delta ember flint grove hazel ivory jade karst lotus maple north olive pearl quartz raven"


@dataclass(frozen=True)
class Item:
    """A chat question; `answer` is the string that must be in the reply, or nothing to check."""

    question: str
    answer: str = ""


@dataclass(frozen=True)
class Score:
    """`reach[i]`: share of steps in which drafts 1..i+1 were all kept; the step that ends an answer counts too."""

    right: float
    reach: tuple[float, ...]
    steps: int
    prompt_tokens: float  # mean


def key_value_items(tokenizer: Tokenizer, n_tokens: int, n: int, seed: int = 0) -> list[Item]:
    """`n` look-ups in JSON objects of about `n_tokens` tokens."""
    rng = random.Random(seed)
    words = NAMES.split()
    items = []
    for i in range(n):
        pairs: dict[str, str] = {}
        size = 0
        while size < n_tokens - 60:
            key = f"{rng.choice(words)}-{rng.choice(words)}-{rng.randrange(100)}"
            pairs[key] = str(rng.randrange(100_000, 1_000_000))
            size += len(tokenizer.encode(f'"{key}": "{pairs[key]}",\n'))
        key = list(pairs)[round(i / max(n - 1, 1) * (len(pairs) - 1))]
        items.append(Item(f"{json.dumps(pairs, indent=1)}\n\nWhat is the value of {key}?", pairs[key]))
    return items


def score(
    engine: Engine, tokenizer: Tokenizer, items: Sequence[Item], max_tokens: int, *, thinking: bool = False
) -> Score:
    """Answer all items greedily."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    prompt_tokens = 0
    for i, item in enumerate(items):
        text = tokenizer.render([{"role": "user", "content": item.question}], options={"enable_thinking": thinking})
        ids = tuple(tokenizer.encode(text))
        prompt_tokens += len(ids)
        engine.add(Request(str(i), ids, params))
    said: dict[str, list[int]] = {str(i): [] for i in range(len(items))}
    steps, kept = 0, [0] * engine.draft_len
    before: dict[str, tuple[int, ...]] = {}
    while engine.has_work:
        for output in engine.step():
            said[output.request_id] += output.tokens
            if output.request_id in before:  # not the prefill, which verifies nothing
                steps += 1
                for j, n in enumerate(output.accepted_per_pos):
                    kept[j] += n - before[output.request_id][j]
            before[output.request_id] = output.accepted_per_pos
    right = sum(item.answer in tokenizer.decode(said[str(i)]) for i, item in enumerate(items))
    reach = tuple(k / max(steps, 1) for k in kept)
    return Score(right / len(items), reach, steps, prompt_tokens / len(items))


def questions(path: Path) -> list[str]:
    """The `question` of every line. Raises ConfigError."""
    try:
        found = [str(json.loads(line)["question"]) for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"{path}: must be JSON lines with a 'question' ({e}).") from e
    if not found:
        raise ConfigError(f"{path}: no question in it.")
    return found


def main() -> None:
    parser = values.parser(__doc__)
    parser.add_argument("models", type=values.folder, nargs="+")
    parser.add_argument("--questions", type=values.file)
    parser.add_argument("--key-values", type=values.count, nargs="*", default=[])
    parser.add_argument("--n", type=values.count, default=20)
    parser.add_argument("--k", type=values.drafts, default=3)
    parser.add_argument("--max-tokens", type=values.count, default=200)
    parser.add_argument("--thinking", action="store_true")
    parser.add_argument("--out", type=values.output)
    args = parser.parse_args()
    for model in args.models:
        tokenizer = Tokenizer.from_folder(model)
        engine = Engine(EngineConfig(model=str(model), draft_len=args.k, max_num_seqs=8))
        sets: dict[str, list[Item]] = {}
        if args.questions:
            sets[args.questions.stem] = [Item(text) for text in questions(args.questions)[: args.n]]
        for size in args.key_values:
            sets[f"key-values-{size}"] = key_value_items(tokenizer, size, args.n)
        for name, items in sets.items():
            s = score(engine, tokenizer, items, args.max_tokens, thinking=args.thinking)
            checked = any(item.answer for item in items)
            reach = [rounded(r, 3) for r in s.reach]
            found = f"right {s.right:.3f} of {len(items)}  " if checked else ""
            print(f"{model.name:12} {name:18} {found}drafts {reach} of {s.steps} steps, {s.prompt_tokens:.0f} tokens")
            if args.out:
                record = {
                    "bench": "chat",
                    "model": model.name,
                    "build": engine.info.build,
                    "set": name,
                    "n": len(items),
                }
                record |= {"n": len(items), **({"right": s.right} if checked else {})}
                record |= {"reach": reach, "steps": s.steps, "prompt_tokens": round(s.prompt_tokens), "k": args.k}
                append(args.out, {**record, **environment(torch.device("cpu"))})


if __name__ == "__main__":
    main()
