"""Scorers on tiny random models: batching, windows and prefixes must not change a score."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForTokenClassification, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from onebox.prompt import CausalScorer, ClassifierScorer, Compressor, LikelihoodRanker

TEXTS = ["the old port was rebuilt", "a", "fish and salt were sold in the old town near the port by the people"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    words = sorted({word for text in TEXTS for word in text.split()})
    vocabulary = {name: index for index, name in enumerate(["[UNK]", "[CLS]", "[SEP]", "[PAD]", "<|end|>", *words])}
    base = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    base.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=base, cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]", eos_token="<|end|>"
    )


@pytest.fixture(scope="module")
def causal(tokenizer: Any) -> CausalScorer:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    return CausalScorer(LlamaForCausalLM(config).eval(), tokenizer)


def test_surprisal_is_the_models_own_loss(causal: CausalScorer, tokenizer: Any) -> None:
    ids = [tokenizer.eos_token_id, *tokenizer(TEXTS[0], add_special_tokens=False)["input_ids"]]
    with torch.inference_mode():
        logits = causal.model(torch.tensor([ids])).logits[0, :-1]
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none").numpy()
    np.testing.assert_allclose(causal.score([TEXTS[0]])[0].scores, expected, atol=1e-5)


def test_a_batch_scores_each_text_as_alone(causal: CausalScorer) -> None:
    prefixes = ["near the town", "", "the"]
    together = causal.score(TEXTS, prefixes=prefixes)
    for text, prefix, found in zip(TEXTS, prefixes, together, strict=True):
        np.testing.assert_allclose(found.scores, causal.score([text], prefixes=[prefix])[0].scores, atol=1e-5)


def test_long_texts_are_scored_to_the_end_in_windows(causal: CausalScorer) -> None:
    small = CausalScorer(causal.model, causal.tokenizer, window=16)
    found = small.score([TEXTS[2] * 1 + " " + TEXTS[2] + " " + TEXTS[2]])[0]
    assert len(found.scores) == 45 and (found.scores > 0).all()


def test_question_likelihood_ranks_through_the_compressor(causal: CausalScorer) -> None:
    compressor = Compressor("longllmlingua", scorer=causal)
    assert isinstance(compressor.ranker, LikelihoodRanker)
    result = compressor.compress(documents=TEXTS * 3, question="the old port", rate=0.5)
    assert result.tokens <= 0.5 * result.original_tokens and {span.rank for span in result.spans} != {None}


def test_a_classifier_batch_scores_each_text_as_alone(tokenizer: Any) -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        id2label={0: "keep", 1: "drop"}, label2id={"keep": 0, "drop": 1},
    )  # fmt: skip
    scorer = ClassifierScorer(BertForTokenClassification(config).eval(), tokenizer)
    assert scorer.label == 0
    for text, found in zip(TEXTS, scorer.score(TEXTS), strict=True):
        np.testing.assert_allclose(found.scores, scorer.score([text])[0].scores, atol=1e-5)
