"""The bundled model as a scorer of prompts: no download, no second model. Needs torch when called."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from onebox.config import bundled_model
from onebox.prompt.surprisal import EngineScorer


def bundled_scorer() -> EngineScorer:
    """Loads the bundled model and scores with its log-probabilities."""
    from tokenizers import Tokenizer

    from onebox.model.load import load_model
    from onebox.model.logprobs import prompt_logprobs

    folder = Path(bundled_model())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = True  # special tokens in a prompt are text

    def encode(text: str) -> tuple[list[int], list[tuple[int, int]]]:
        found = tokenizer.encode(text, add_special_tokens=False)
        return found.ids, found.offsets

    score = partial(prompt_logprobs, load_model(folder, mtp=False).model)
    first = tokenizer.token_to_id("<|endoftext|>")
    return EngineScorer(score, encode, first=first, window=1024, name="the bundled model")
