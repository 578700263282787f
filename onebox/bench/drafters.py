"""Drafters side by side on the same chats: tokens a second, tokens a step, drafts kept. The text must not differ.

python -m onebox.bench.drafters --model onebox/models/tiny --n 6 --max-tokens 80
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from onebox.bench import values
from onebox.bench.chat import key_value_items
from onebox.bench.record import append, environment, rounded
from onebox.config import EngineConfig
from onebox.engine.engine import Engine
from onebox.request import Request, SamplingParams
from onebox.server.chat import Tokenizer

METHODS: dict[str, dict[str, Any]] = {
    "none": {"draft_len": 0},
    "mtp 3": {"draft_len": 3},
    "mtp 3 adaptive": {"draft_len": 3, "adaptive_drafts": True},
    "ngram 3": {"draft_len": 3, "draft_method": "ngram"},
    "ngram 3 adaptive": {"draft_len": 3, "draft_method": "ngram", "adaptive_drafts": True},
}
TOPICS = (
    "a lighthouse",
    "how bread rises",
    "the rules of chess",
    "a walk in the rain",
    "what magnets do",
    "an old clock",
)


def chats(tokenizer: Tokenizer, n: int) -> dict[str, list[tuple[int, ...]]]:
    """Prompts whose answers repeat the prompt, and prompts whose answers do not."""
    copied = [
        item.question + " Repeat the first five lines of the data." for item in key_value_items(tokenizer, 300, n)
    ]
    free = [f"Write a few sentences about {TOPICS[i % len(TOPICS)]}, part {i}." for i in range(n)]

    def ids(text: str) -> tuple[int, ...]:
        rendered = tokenizer.render([{"role": "user", "content": text}], options={"enable_thinking": False})
        return tuple(tokenizer.encode(rendered))

    return {"copying": [ids(text) for text in copied], "free": [ids(text) for text in free]}


def run(engine: Engine, prompts: list[tuple[int, ...]], batch: int, max_tokens: int) -> dict[str, Any]:
    """Answer the prompts `batch` at a time; only decode steps are timed."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    seconds, tokens, steps, said = 0.0, 0, 0, list[list[int]]()
    before = engine.stats()
    for first in range(0, len(prompts), batch):
        part = prompts[first : first + batch]
        answers: dict[str, list[int]] = {str(i): [] for i in range(len(part))}
        for i, prompt in enumerate(part):
            engine.add(Request(str(i), prompt, params))
        while engine.has_work:
            decoding = all(answers.values())
            start = time.perf_counter()
            outputs = engine.step()
            if decoding:
                seconds += time.perf_counter() - start
                tokens += sum(len(o.tokens) for o in outputs)
                steps += len(outputs)
            for output in outputs:
                answers[output.request_id] += output.tokens
        said += answers.values()
    after = engine.stats()
    drafted = after.drafted_tokens - before.drafted_tokens
    kept = after.accepted_tokens - before.accepted_tokens
    return {
        "said": said,
        "tok_s": rounded(tokens / seconds),
        "tokens_per_step": rounded(tokens / steps),
        "drafted_per_step": rounded(drafted / steps),
        "acceptance": rounded(kept / drafted, 3) if drafted else 0.0,
    }


def main() -> None:
    parser = values.parser(__doc__)
    parser.add_argument("--model", type=values.folder, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=values.count, nargs="+", default=[1])
    parser.add_argument("--n", type=values.count, default=6)
    parser.add_argument("--max-tokens", type=values.count, default=80)
    parser.add_argument("--commit", help="the commit, where the checkout is not at hand")
    parser.add_argument("--out", type=values.output, default=Path("results/engine.jsonl"))
    args = parser.parse_args()
    prompts = chats(Tokenizer.from_folder(args.model), args.n)
    want: dict[tuple[str, int], list[list[int]]] = {}
    for name, options in METHODS.items():
        engine = Engine(EngineConfig(model=str(args.model), device=args.device, prefix_caching=False, **options))
        for batch in args.batch:
            for kind, asked in prompts.items():
                found = run(engine, asked, batch, args.max_tokens)
                said = found.pop("said")
                record = {
                    "bench": "drafters",
                    "model": args.model.name,
                    "drafter": name,
                    "chats": kind,
                    "batch": batch,
                    "n": args.n,
                    **found,
                    "same_text": want.setdefault((kind, batch), said) == said,
                }
                print(record, flush=True)
                append(args.out, record | environment(torch.device(engine.config.device), args.commit))


if __name__ == "__main__":
    main()
