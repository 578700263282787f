"""The interface of `llmlingua.PromptCompressor` over the methods here: its arguments in, its dictionary out.

Where the original crashes or damages text, this does not; arguments that never had an effect are accepted with one
warning each. `target_token` counts the context alone, as there.
"""

from __future__ import annotations

import gzip
import json
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import regex

from onebox.errors import PromptError
from onebox.prompt.budget import counter_of
from onebox.prompt.causal import CausalScorer
from onebox.prompt.compressor import CompressedPrompt, Compressor
from onebox.prompt.fields import compress_fields
from onebox.prompt.llmlingua2 import ClassifierScorer
from onebox.prompt.longllmlingua import LikelihoodRanker
from onebox.prompt.ranking import Bm25Ranker, CallableRanker, CrossEncoderRanker, EmbeddingRanker
from onebox.prompt.recovery import align, recover
from onebox.prompt.scoring import Ranker, Scorer
from onebox.prompt.security import SecurityLingua
from onebox.prompt.segments import Bonds, Options, text_pieces

_INERT = {
    "force_context_number": None,
    "keep_split": False,
    "keep_sentence_number": 0,
    "high_priority_bonus": 100,
    "strict_preserve_uncompressed": True,
}
_EMBEDDINGS = {
    "sentbert": "sentence-transformers/multi-qa-mpnet-base-dot-v1",
    "bge": "BAAI/bge-large-en-v1.5",
    "jinza": "jinaai/jina-embeddings-v2-base-en",
}
_CROSS_ENCODERS = {"bge_reranker": "BAAI/bge-reranker-large"}
_RANK_METHODS = ("llmlingua", "longllmlingua", "bm25", "gzip", *_EMBEDDINGS, *_CROSS_ENCODERS)


class PromptCompressor:
    """`scorer` and `tokenizer` (what tokens are in the figures given back) are additions."""

    def __init__(
        self,
        model_name: str = "NousResearch/Llama-2-7b-hf",
        device_map: str = "cuda",
        model_config: Mapping[str, Any] | None = None,
        open_api_config: Mapping[str, Any] | None = None,
        use_llmlingua2: bool = False,
        use_slingua: bool = False,
        llmlingua2_config: Mapping[str, Any] | None = None,
        *,
        scorer: Scorer | None = None,
        tokenizer: Any | None = None,
    ) -> None:
        self._warned: set[str] = set()
        self._lock = threading.Lock()
        if open_api_config:
            self._warn("open_api_config", "documents are ranked by models that are here, or by ranker=")
        self.use_llmlingua2, self.use_slingua = use_llmlingua2 or use_slingua, use_slingua
        own = dict(llmlingua2_config or {})
        self.max_force_tokens = int(own.pop("max_force_token", 100))
        if "max_batch_size" in own and own.pop("max_batch_size") is not None:
            self._warn("llmlingua2_config['max_batch_size']", "batches are sized by their tokens")
        if own:
            raise PromptError(f"llmlingua2_config: unknown {', '.join(sorted(own))}; known: max_force_token")
        if scorer is None:
            scorer = _open(model_name, device_map, dict(model_config or {}), classifier=self.use_llmlingua2)
        self.scorer = scorer
        self.count = counter_of(tokenizer if tokenizer is not None else getattr(scorer, "tokenizer", None))
        self._rankers: dict[str, Ranker] = {}

    def __call__(self, *args: Any, **options: Any) -> dict[str, Any]:
        return self.compress_prompt(*args, **options)

    def get_token_length(self, text: str, add_special_tokens: bool = False, **_: Any) -> int:
        return self.count(text)

    def compress_prompt(
        self,
        context: str | Sequence[str],
        instruction: str = "",
        question: str = "",
        rate: float = 0.5,
        target_token: float = -1,
        iterative_size: int = 200,
        force_context_ids: Sequence[int] | None = None,
        force_context_number: int | None = None,
        use_sentence_level_filter: bool = False,
        use_context_level_filter: bool = True,
        use_token_level_filter: bool = True,
        keep_split: bool = False,
        keep_first_sentence: int = 0,
        keep_last_sentence: int = 0,
        keep_sentence_number: int = 0,
        high_priority_bonus: int = 100,
        context_budget: str = "+100",
        token_budget_ratio: float = 1.4,
        condition_in_question: str = "none",
        reorder_context: str = "original",
        dynamic_context_compression_ratio: float = 0.0,
        condition_compare: bool = False,
        add_instruction: bool = False,
        rank_method: str = "llmlingua",
        concate_question: bool = True,
        context_segs: Any = None,
        context_segs_rate: Any = None,
        context_segs_compress: Any = None,
        target_context: int = -1,
        context_level_rate: float = 1.0,
        context_level_target_token: int = -1,
        return_word_label: bool = False,
        word_sep: str = "\t\t|\t\t",
        label_sep: str = " ",
        token_to_word: str = "mean",
        force_tokens: Sequence[str] = (),
        force_reserve_digit: bool = False,
        drop_consecutive: bool = False,
        chunk_end_tokens: Sequence[str] = (".", "\n"),
        strict_preserve_uncompressed: bool = True,
        *,
        ranker: Ranker | Callable[[str, Sequence[str]], Sequence[float]] | None = None,
        tags: bool = False,
    ) -> dict[str, Any]:
        """The compressed prompt and its figures, under the original's keys; `trace` has the reasons."""
        texts = [context] if isinstance(context, str) else list(context)
        for name, value in (
            ("force_context_number", force_context_number),
            ("keep_split", keep_split),
            ("keep_sentence_number", keep_sentence_number),
            ("high_priority_bonus", high_priority_bonus),
            ("strict_preserve_uncompressed", strict_preserve_uncompressed),
        ):
            if value != _INERT[name]:
                self._warn(name, "it has no effect")
        if not use_token_level_filter and use_sentence_level_filter is False and len(texts) == 1:
            self._warn("use_token_level_filter=False", "with one context and no sentence filter nothing may go")
        if any(given is not None for given in (context_segs, context_segs_rate, context_segs_compress)):
            raise PromptError("context_segs: are internal; tag the text and call structured_compress_prompt")
        if len(force_tokens) > self.max_force_tokens:
            raise PromptError(f"force_tokens: {len(force_tokens)} strings; max_force_token is {self.max_force_tokens}")
        if self.use_slingua:
            found = SecurityLingua(self.scorer).extract_intention("\n\n".join(texts))
            return self._figures("\n\n".join(texts), found.text, [found.text])
        condition, prefixed = _condition(condition_in_question, rank_method, condition_compare)
        if not question and (rank_method == "longllmlingua" or condition in ("before", "after")):
            raise PromptError("question: is missing; rank_method='longllmlingua' ranks documents by it")
        asked = f"{instruction}\n\n{question}" if add_instruction and question else question
        whole = "\n\n".join(part for part in (instruction, *texts, question if concate_question else "") if part)
        tokens, total = self.count("\n\n".join(texts)), self.count(whole)
        if not 0 <= rate <= 1:
            raise PromptError(f"rate: {rate!r} must lie in [0, 1]: compressed over original tokens")
        target = float(target_token) if target_token > 0 else rate * total - (total - tokens)
        target = min(max(target, 0.0), float(tokens))
        level: Any = "token" if use_token_level_filter else "sentence"
        ranking: Ranker | None = None
        if question:
            ranking = CallableRanker(ranker) if callable(ranker) else ranker or self._ranker(rank_method, condition)
        coarse = 1e9
        if use_context_level_filter and len(texts) > 1 and target:
            coarse = self._coarse(context_budget, target, tokens, context_level_rate, context_level_target_token)
        options: dict[str, Any] = {
            "scorer": self.scorer,
            "ranker": ranking,
            "force_tokens": [token for token in force_tokens if token.strip()],
            "drop_consecutive": drop_consecutive,
            "keep_digits": force_reserve_digit,
            "order": reorder_context if reorder_context in ("original", "two_stage") else "sort",
            "dynamic": min(1.0, max(0.0, dynamic_context_compression_ratio)),
            "segment": max(1, int(iterative_size)),
            "coarse": max(1.0, coarse),
            "aggregate": "first" if token_to_word == "first" else "mean",
        }
        method: Any = "llmlingua2" if self.use_llmlingua2 else "longllmlingua" if prefixed else "llmlingua"
        if method == "longllmlingua":
            options["compare"] = condition_compare
        compressor = Compressor(method, level=level, **options)
        call: dict[str, Any] = {
            "question": asked or None,
            "append_question": False,
            "tokenizer": self.count,
            "keep_documents": list(force_context_ids or ()),
            "max_documents": target_context if target_context > 0 else None,
        }
        if tags:
            result = compressor.compress(documents=texts, rate=target / max(tokens, 1), tags=True, **call)
        else:
            edges = keep_first_sentence or keep_last_sentence
            if use_sentence_level_filter and use_token_level_filter:
                kept = Compressor(method, level="sentence", **options).compress(
                    documents=[_edges(text, keep_first_sentence, keep_last_sentence) for text in texts],
                    rate=min(1.0, token_budget_ratio * target / max(tokens, 1)),
                    tags=bool(edges),
                    **call,
                )
                remaining = [text for text in kept.documents if text.strip()] or [""]
                rest = {**call, "keep_documents": [], "max_documents": None}
                share = min(1.0, target / max(self.count("\n\n".join(remaining)), 1))
                result = compressor.compress(documents=remaining, rate=share, **rest)
            else:
                result = compressor.compress(
                    documents=[_edges(text, keep_first_sentence, keep_last_sentence) for text in texts],
                    rate=target / max(tokens, 1),
                    tags=bool(edges),
                    **call,
                )
        ends = (instruction, result.text, question if concate_question else "")
        text = "\n\n".join(part for part in ends if part)
        figures = self._figures(whole, text, [part for part in result.documents if part.strip()]) | {
            "trace": result.trace
        }
        if return_word_label:
            figures["fn_labeled_original_prompt"] = word_sep.join(
                f"{span.text}{label_sep}{int(span.kept)}" for span in result.spans
            )
        return figures

    def compress_prompt_llmlingua2(self, context: str | Sequence[str], **options: Any) -> dict[str, Any]:
        return self.compress_prompt(context, **{"use_context_level_filter": False, **options})

    def structured_compress_prompt(
        self,
        context: str | Sequence[str],
        instruction: str = "",
        question: str = "",
        rate: float = 0.5,
        target_token: float = -1,
        **options: Any,
    ) -> dict[str, Any]:
        """As `compress_prompt`, with `<llmlingua, rate=0.4, compress=True>...</llmlingua>` in the contexts. Text
        outside tags has the call's rate. What a tag protects stays byte for byte, by every method."""
        return self.compress_prompt(context, instruction, question, rate, target_token, tags=True, **options)

    def compress_json(
        self,
        json_data: Mapping[str, Any],
        json_config: Mapping[str, Any] | str,
        instruction: str = "",
        question: str = "",
        rate: float = 0.5,
        target_token: float = -1,
        iterative_size: int = 200,
        use_keyvalue_level_filter: bool = False,
        **options: Any,
    ) -> dict[str, Any]:
        """Strings of the fields whose config says `compress`, at the field's `rate`; `pair_remove` fields may go whole
        with `use_keyvalue_level_filter`. Types, keys, order, numbers, true and null stay. A config may nest like its
        data. `compressed_prompt` is a Python object, as there."""
        for name in options:
            self._warn(f"compress_json({name}=)", "it has no effect")
        config = _read_config(json_config)
        method: Any = "llmlingua2" if self.use_llmlingua2 else "llmlingua"
        compressor = Compressor(method, scorer=self.scorer, segment=max(1, int(iterative_size)))
        before = json.dumps(json_data, ensure_ascii=False)
        if target_token > 0:
            rate = min(1.0, target_token / max(self.count(before), 1))
        data = compress_fields(
            json_data,
            config,
            compressor,
            rate=rate,
            question=question or None,
            tokenizer=self.count,
            remove_pairs=use_keyvalue_level_filter,
        )
        return {**self._figures(before, json.dumps(data, ensure_ascii=False), []), "compressed_prompt": data}

    def recover(self, original_prompt: str, compressed_prompt: str, response: str) -> str:
        """The response with phrases of the compressed prompt put back as they stand in the original."""
        return recover(response, compressed_prompt, align(original_prompt, compressed_prompt), (original_prompt,)).text

    def _figures(self, before: str, after: str, parts: list[str]) -> dict[str, Any]:
        origin, tokens = self.count(before), self.count(after)
        return {
            "compressed_prompt": after,
            "compressed_prompt_list": parts,
            "origin_tokens": origin,
            "compressed_tokens": tokens,
            "ratio": f"{origin / tokens if tokens else 1:.1f}x",
            "rate": f"{100 * tokens / origin if origin else 100:.1f}%",
            "saving": f", {origin - tokens} tokens saved",
        }

    def _coarse(self, budget: str, target: float, tokens: int, level_rate: float, level_tokens: int) -> float:
        """How many times the target the contexts that stay may take. Raises PromptError for what is no budget."""
        if level_tokens > 0:
            return level_tokens / target
        if level_rate < 1:
            return level_rate * tokens / target
        if self.use_llmlingua2:
            return (target / tokens + 1) / 2 * tokens / target
        found = regex.fullmatch(r"\s*([+*-])\s*(\d{1,9}(?:\.\d{1,9})?)\s*", budget)
        if found is None:
            raise PromptError(f"context_budget: {budget!r} is not '+', '-' or '*' and a number, such as '+100' or '*2'")
        number = float(found[2])
        wide = target * number if found[1] == "*" else target + number if found[1] == "+" else target - number
        return wide / target

    def _ranker(self, name: str, condition: Any) -> Ranker:
        with self._lock:
            if name in ("llmlingua", "longllmlingua"):
                return Bm25Ranker() if self.use_llmlingua2 else LikelihoodRanker(self.scorer, condition)
            if name not in self._rankers:
                if name == "bm25":
                    self._rankers[name] = Bm25Ranker()
                elif name == "gzip":
                    self._rankers[name] = CallableRanker(_gzip_similarity, name="gzip")
                elif name in _EMBEDDINGS:
                    self._rankers[name] = EmbeddingRanker.from_pretrained(_EMBEDDINGS[name])
                elif name in _CROSS_ENCODERS:
                    self._rankers[name] = CrossEncoderRanker.from_pretrained(_CROSS_ENCODERS[name])
                else:
                    raise PromptError(
                        f"rank_method: unknown {name!r}; known: {', '.join(_RANK_METHODS)}; or pass ranker="
                    )
            return self._rankers[name]

    def _warn(self, name: str, why: str) -> None:
        with self._lock:
            if name in self._warned:
                return
            self._warned.add(name)
        warnings.warn(f"{name}: {why}", UserWarning, stacklevel=4)


def _open(name: str, device: str, config: dict[str, Any], *, classifier: bool) -> Scorer:
    if config.pop("trust_remote_code", False):
        raise PromptError("model_config['trust_remote_code']: code that comes with a model is never run; leave it out")
    for inert in ("pad_to_left", "device_map"):
        config.pop(inert, None)
    if "torch_dtype" in config:
        config["dtype"] = config.pop("torch_dtype")
    if classifier:
        scorer: Scorer = ClassifierScorer.from_pretrained(name, **config)
    else:
        scorer = CausalScorer.from_pretrained(name, **config)
    place = device if device.split(":")[0] in ("cpu", "cuda", "mps") else "auto"
    return _placed(scorer, place)


def _placed(scorer: Any, device: str) -> Scorer:
    import torch

    if device in ("auto", "cuda"):
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if not getattr(scorer.model, "is_quantized", False):
        scorer.model.to(device)
    placed: Scorer = scorer
    return placed


def _condition(condition: str, rank_method: str, compare: bool) -> tuple[Any, bool]:
    """(ranking condition, whether tokens are scored after the question) from the original's spelling."""
    name = condition.removesuffix("_condition")
    if name not in ("none", "before", "after"):
        raise PromptError(
            f"condition_in_question: unknown {condition!r}; use none, before or after, with or without _condition"
        )
    if rank_method == "longllmlingua" and name == "none":
        name = "after"
    elif rank_method == "llmlingua":
        name = "none"
    return name, compare or condition.endswith("_condition")


def _edges(text: str, first: int, last: int) -> str:
    """The text with its first and last sentences in tags that protect them."""
    if not first and not last:
        return text
    row = text_pieces(text, 0, len(text), Bonds(), Options())
    numbers = sorted({piece.sentence for piece in row})
    held = set(numbers[:first]) | set(numbers[len(numbers) - last :] if last else ())
    out, at = [], 0
    for number in numbers:
        inside = [piece for piece in row if piece.sentence == number]
        if number in held:
            start, end = inside[0].start, inside[-1].end
            out += [text[at:start], "<llmlingua compress=False>", text[start:end], "</llmlingua>"]
            at = end
    return "".join([*out, text[at:]])


def _gzip_similarity(question: str, documents: Sequence[str]) -> list[float]:
    def size(text: str) -> int:
        return len(gzip.compress(text.encode()))

    asked = size(question)
    return [-(size(f"{question} {text}") - min(asked, size(text))) / max(asked, size(text)) for text in documents]


def _read_config(config: Mapping[str, Any] | str) -> Mapping[str, Any]:
    if isinstance(config, str):
        try:
            import yaml
        except ModuleNotFoundError as e:
            raise PromptError("json_config: a YAML file needs PyYAML; or pass a dictionary") from e
        try:
            config = yaml.safe_load(Path(config).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
            raise PromptError(f"json_config: cannot be read as YAML ({e})") from e
    if not isinstance(config, Mapping):
        raise PromptError(f"json_config: {type(config).__name__} is no dictionary; give one with the keys of the data")
    return config


__all__ = ["CompressedPrompt", "PromptCompressor"]
