"""The methods on small random models and scripted scorers: what is read after what, ranking, rates, combinations."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import (
    BertConfig,
    BertForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from onebox.errors import PromptError
from onebox.prompt import (
    Bm25Ranker,
    CallableRanker,
    CausalScorer,
    ClassifierScorer,
    Compressor,
    CrossEncoderRanker,
    EmbeddingRanker,
    EngineScorer,
    LikelihoodRanker,
    TokenScores,
)
from onebox.prompt.llmlingua import Stretch, along_a_chain, demonstrations_rate, iterative_scores, quantiles
from onebox.prompt.longllmlingua import order_by_rank, rates_by_rank
from onebox.prompt.segments import Bonds, Options, Piece, text_pieces
from onebox.prompt.surprisal import PlainChain, chain_of

PROSE = (
    "The harbour was rebuilt in 1887 after the great storm. Engineers from Lisbon designed the breakwater, which is "
    "640 m long and still protects the old town. Fishing declined during the war, but the canneries reopened in 1951 "
    "and employed nearly two thousand people. Today the port handles container traffic, ferries and a small marina. "
)
OTHERS = [
    "A choir met on Tuesdays in the hall behind the station and sang motets by Byrd until the roof fell in. ",
    "The bakery sold rye loaves, seed cake and barley rolls; its oven was lit at three each morning by an apprentice. ",
    "Glaciers in the upper valley retreated by forty metres a year, and the hut at their foot had to be moved twice. ",
]


class Scripted:
    """Scores each word by a function of (word, prefix); remembers what it was asked."""

    name = "scripted"

    def __init__(self, function: Any = lambda word, prefix: float(len(word))) -> None:
        self.function = function
        self.asked: list[tuple[list[str], list[str]]] = []

    def score(self, texts: Sequence[str], *, prefixes: Sequence[str] | None = None) -> list[TokenScores]:
        before = list(prefixes) if prefixes else [""] * len(texts)
        self.asked.append((list(texts), before))
        out = []
        for text, prefix in zip(texts, before, strict=True):
            found = [(m.start(), m.end(), self.function(m.group(), prefix)) for m in re.finditer(r"\S+", text)]
            out.append(TokenScores.of([(a, b) for a, b, _ in found], np.array([s for _, _, s in found])))
        return out


def byte_tokenizer() -> Any:
    """Byte-level: every text round-trips, offsets of multi-byte characters overlap."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(["<|end|>", *alphabet])}
    base = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    base.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=base, eos_token="<|end|>")


@pytest.fixture(scope="module")
def causal() -> CausalScorer:
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    return CausalScorer(LlamaForCausalLM(config).eval(), tokenizer, window=256)


def pieces(text: str) -> list[Piece]:
    return text_pieces(text, 0, len(text), Bonds(), Options())


# LLMLingua


def test_the_budget_controller_is_the_papers_equation() -> None:
    # tau_dem = (tau L - tau_ins L_ins - tau_que L_que) / L_dem
    assert demonstrations_rate(500, [(0.85, 100), (0.9, 20)], 880) == pytest.approx((500 - 85 - 18) / 880)
    assert demonstrations_rate(50, [(0.85, 100)], 880) == 0.0 and demonstrations_rate(900, [], 800) == 1.0


def test_each_segment_is_read_after_what_is_left_of_those_before_it() -> None:
    scorer = Scripted()
    text = PROSE * 2
    iterative_scores(scorer, [Stretch(text, pieces(text), 0.3, segment_characters=120)])
    prefixes = [before[0] for _, before in scorer.asked]
    stretches = [texts[0] for texts, _ in scorer.asked]
    assert "".join(stretches) == text.rstrip() and len(stretches) >= 6
    assert prefixes[0] == "" and all(len(s) <= 132 for s in stretches)
    read = 0
    for prefix, stretch in zip(prefixes, stretches, strict=True):
        assert len(prefix) <= 0.35 * read + 1
        before = iter("".join(text[:read].split()))
        assert all(letter in before for letter in "".join(prefix.split()))  # a subsequence: nothing added or moved
        read += len(stretch)


def test_short_texts_are_read_in_rounds_and_score_as_along_a_chain(causal: CausalScorer) -> None:
    texts = [PROSE, OTHERS[0], PROSE[:90]]
    work = [Stretch(t, pieces(t), 0.5, 100, question="Which port?", compare=c) for t in texts for c in (True, False)]
    assert {len(one.segments()) for one in work} == {1, 3}
    for together, one in zip(iterative_scores(causal, work), work, strict=True):
        np.testing.assert_allclose(together, along_a_chain(causal, one), atol=1e-4)


def test_what_the_ranking_has_read_is_not_read_again(causal: CausalScorer) -> None:
    documents, question = [PROSE, *OTHERS], "What does the port handle?"
    read: list[str] = []

    class Counted:
        name = "counted"

        def score(self, texts: Sequence[str], *, prefixes: Sequence[str] | None = None) -> list[TokenScores]:
            read.extend(t for t, before in zip(texts, prefixes or [""] * len(texts), strict=True) if not before)
            return causal.score(texts, prefixes=prefixes)

    scorer = Counted()
    reused = Compressor("longllmlingua", scorer=scorer, segment=500).compress(
        documents=documents, question=question, rate=0.6, append_question=False
    )
    assert len(read) == len(documents) and all(question in text for text in read)
    ranker = CallableRanker(lambda asked, texts: LikelihoodRanker(causal).read(asked, texts, keep=True)[0])
    again = Compressor("longllmlingua", scorer=scorer, ranker=ranker, segment=500).compress(
        documents=documents, question=question, rate=0.6, append_question=False
    )
    assert reused.text == again.text and len(read) > len(documents)
    together, kept = LikelihoodRanker(causal).read(question, documents, keep=True)
    np.testing.assert_allclose(together, LikelihoodRanker(causal).rank(question, documents), rtol=0.05)
    for scores, text in zip(kept, documents, strict=True):
        np.testing.assert_allclose(scores.scores, causal.score([text])[0].scores, atol=1e-4)


def test_the_cached_chain_scores_as_the_plain_one(causal: CausalScorer) -> None:
    ours, plain = chain_of(causal, "a question "), PlainChain(causal, "a question ")
    assert type(ours) is not PlainChain
    for stretch, kept in ((PROSE[:50], PROSE[10:30]), (PROSE[50:90], PROSE[60:80]), (PROSE[90:100], "")):
        np.testing.assert_allclose(ours.read(stretch).scores, plain.read(stretch).scores, atol=1e-4)
        np.testing.assert_allclose(ours.read(stretch).scores, plain.read(stretch).scores, atol=1e-4)
        ours.commit(kept)
        plain.commit(kept)


def test_a_chain_longer_than_the_window_goes_on(causal: CausalScorer) -> None:
    chain = chain_of(causal, "q ")
    for at in range(0, 1200, 60):
        stretch = (PROSE * 4)[at : at + 60]
        assert np.isfinite(chain.read(stretch).scores).all()
        chain.commit(stretch[:40])


@pytest.mark.parametrize("text", [PROSE[:150], PROSE[56:200], OTHERS[0]])
def test_a_prompt_shorter_than_a_segment_is_compressed(causal: CausalScorer, text: str) -> None:
    result = Compressor("llmlingua", scorer=causal).compress(text, rate=0.5)
    assert result.status == "compressed" and 0.35 <= result.ratio <= 0.5


def test_instruction_and_question_are_compressed_at_their_own_rates() -> None:
    compressor = Compressor("llmlingua", scorer=Scripted(), keep_rules=False)
    result = compressor.compress(
        documents=[PROSE * 2], instruction=PROSE, question=" ".join(OTHERS), rate=0.5, tokenizer=len
    )
    instruction, _, question = result.documents
    assert 0.75 <= len(instruction.strip()) / len(PROSE.strip()) <= 0.85
    assert 0.8 <= len(question.strip()) / len(" ".join(OTHERS).strip()) <= 0.9
    assert result.tokens <= 0.5 * result.original_tokens
    whole = Compressor("llmlingua", scorer=Scripted(), instruction_rate=1.0, question_rate=1.0)
    kept = whole.compress(documents=[PROSE * 4], instruction=PROSE, question=OTHERS[0], rate=0.5, tokenizer=len)
    assert kept.documents[0].strip() == PROSE.strip() and kept.documents[2].strip() == OTHERS[0].strip()


def test_demonstrations_are_chosen_by_surprisal_and_keep_their_order() -> None:
    dull = [text.replace("the", "a") for text in OTHERS]
    documents = [dull[0], PROSE, dull[1], PROSE.upper(), dull[2]]
    scorer = Scripted(lambda word, prefix: 9.0 if word.isupper() else 5.0 if "harbour" in word else 1.0)
    result = Compressor("llmlingua", scorer=scorer, coarse=1.0).compress(documents=documents, rate=0.25)
    assert result.documents[3] and not result.documents[0] + result.documents[4]
    assert {span.rank for span in result.spans if span.part == 3} == {0}


def test_quantiles_are_shares_of_the_text_below() -> None:
    first, second = quantiles([np.array([3.0, 1.0]), np.array([2.0])], [np.array([1.0, 2.0]), np.array([1.0])])
    np.testing.assert_allclose(first, [0.75, 0.0])
    np.testing.assert_allclose(second, [0.5])


# LongLLMLingua


def test_question_likelihood_conditions_on_each_document_in_one_batch() -> None:
    scorer = Scripted(lambda word, prefix: 1.0 if "Byrd" in prefix else 4.0)
    ranks = LikelihoodRanker(scorer).rank("Who sang?", OTHERS)
    assert int(np.argmax(ranks)) == 0 and len(scorer.asked) == 1
    texts, before = scorer.asked[0]
    assert all(text.startswith("Who sang?") and "in the given documents" in text for text in texts)
    assert [text.strip() for text in before] == [text.strip() for text in OTHERS]


def test_the_other_conditions_score_the_documents() -> None:
    scorer = Scripted(lambda word, prefix: 1.0 if prefix and word == "Byrd" else 5.0 if word == "Byrd" else 2.0)
    before = LikelihoodRanker(scorer, "before").rank("Who sang?", OTHERS)
    contrast = LikelihoodRanker(scorer, "before", compare=True).rank("Who sang?", OTHERS)
    none = LikelihoodRanker(scorer, "none").rank("", OTHERS)
    assert int(np.argmax(before)) == int(np.argmax(contrast)) == int(np.argmax(none)) == 0
    assert contrast[1] == contrast[2] == 0.0 and contrast[0] > 0


def test_a_long_document_is_ranked_by_its_best_passage() -> None:
    scorer = Scripted(lambda word, prefix: 1.0 if "Byrd" in prefix else 4.0)
    ranks = LikelihoodRanker(scorer).rank("Who sang?", [PROSE * 8, PROSE * 8 + OTHERS[0] + PROSE * 8])
    assert ranks[1] > ranks[0]


@pytest.mark.parametrize(
    ("order", "expected"), [("sort", [2, 0, 3, 1]), ("original", [0, 1, 2, 3]), ("two_stage", [2, 3, 1, 0])]
)
def test_documents_are_put_in_order(order: Any, expected: list[int]) -> None:
    assert order_by_rank([1, 3, 0, 2], order) == expected


def test_rates_fall_with_the_rank_and_stay_in_bounds() -> None:
    rates = rates_by_rank([0, 1, 2, 3, 4], 0.5, 0.3)
    assert rates == pytest.approx([0.8, 0.65, 0.5, 0.35, 0.2])
    assert rates_by_rank([0, 1], 0.9, 0.4) == [1.0, 0.5] and rates_by_rank([0], 0.4, 0.3) == pytest.approx([0.7])


def test_a_better_rank_keeps_more_of_a_document() -> None:
    documents = [PROSE, PROSE.replace("harbour", "station"), PROSE.replace("harbour", "airport")]
    ranker = CallableRanker(lambda question, texts: [0.0, 2.0, 1.0])
    kept = []
    for dynamic in (0.0, 0.4):
        compressor = Compressor("llmlingua2", scorer=Scripted(), ranker=ranker, dynamic=dynamic)
        result = compressor.compress(documents=documents, question="x", rate=0.5, append_question=False)
        kept.append([len(text) for text in result.documents])
    assert kept[1][1] > kept[1][2] > kept[1][0] and max(kept[0]) - min(kept[0]) < 0.2 * max(kept[0])


def test_contrastive_scores_are_what_the_question_changes() -> None:
    scorer = Scripted(lambda word, prefix: 1.0 if word == "breakwater," and "breakwater" in prefix else 3.0)
    row = pieces(PROSE)
    asked = "How long is the breakwater?"
    [scores] = iterative_scores(scorer, [Stretch(PROSE, row, 0.5, 1000, question=asked, compare=True)])
    best = [PROSE[row[i].start : row[i].end] for i in np.flatnonzero(scores == scores.max())]
    assert "breakwater" in best and set(best) <= {"breakwater", ","} and scores.max() == 2.0


@pytest.mark.parametrize("order", ["sort", "original", "two_stage"])
@pytest.mark.parametrize("compare", [True, False])
@pytest.mark.parametrize("condition", ["none", "before", "after"])
def test_every_variant_meets_its_budget(causal: CausalScorer, order: Any, compare: bool, condition: Any) -> None:
    compressor = Compressor("longllmlingua", scorer=causal, order=order, compare=compare, condition=condition)
    result = compressor.compress(documents=[PROSE, *OTHERS], question="What does the port handle?", target_tokens=60)
    assert 54 <= result.tokens <= 60


# LLMLingua-2


def classifier(tokenizer: Any, words: dict[str, float]) -> Any:
    """A fake model whose keep-probability is a function of the token's text."""

    class Model:
        device = torch.device("cpu")
        config = type("Config", (), {"id2label": {0: "LABEL_0", 1: "LABEL_1"}, "max_position_embeddings": 512})
        shapes: list[tuple[int, int]] = []  # noqa: RUF012

        def __call__(self, *, input_ids: Any, attention_mask: Any) -> Any:
            self.shapes.append(tuple(input_ids.shape))
            values = torch.tensor(
                [[words.get(t, 0.1) for t in tokenizer.convert_ids_to_tokens(row.tolist())] for row in input_ids]
            )
            logits = torch.stack([torch.zeros_like(values), torch.logit(values)], -1)
            return type("Out", (), {"logits": logits})

    return Model()


def wordpiece(extra: Sequence[str] = ()) -> Any:
    text = " ".join([PROSE, *OTHERS]).lower()
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *sorted(set(re.findall(r"\w+|[^\w\s]", text))), *extra]
    base = Tokenizer(models.WordPiece({name: i for i, name in enumerate(dict.fromkeys(names))}, unk_token="[UNK]"))
    base.normalizer = normalizers.BertNormalizer()
    base.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return PreTrainedTokenizerFast(
        tokenizer_object=base, cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]", unk_token="[UNK]"
    )


def test_one_threshold_serves_all_chunks() -> None:
    tokenizer = wordpiece()
    probabilities = dict.fromkeys(["choir", "tuesdays", "motets", "byrd", "station", "roof", "hall", "sang"], 0.95)
    scorer = ClassifierScorer(classifier(tokenizer, probabilities), tokenizer, chunk=40)
    dense = "Choir Tuesdays motets Byrd station roof hall sang"
    text = PROSE * 3 + dense + ". " + PROSE * 3
    result = Compressor("llmlingua2", scorer=scorer, keep_rules=False).compress(text, rate=0.1)
    kept = " ".join(span.text for span in result.kept)
    assert all(word in kept for word in dense.split())


def test_chunks_end_at_sentences_and_short_texts_are_not_padded() -> None:
    tokenizer = wordpiece()
    model = classifier(tokenizer, {})
    scorer = ClassifierScorer(model, tokenizer, chunk=40)
    encoded = tokenizer(PROSE, add_special_tokens=False, return_offsets_mapping=True)
    cuts = scorer._cuts(PROSE, encoded["offset_mapping"])
    assert len(cuts) > 1 and all(end - begin <= 40 for begin, end in cuts)
    assert all(PROSE[encoded["offset_mapping"][end - 1][0]] == "." for _, end in cuts)
    scorer.score(["The old town"])
    assert model.shapes[-1] == (1, 5)


def test_word_pieces_and_subwords_are_one_word() -> None:
    tokenizer = wordpiece(["fuel", "##ing", "##s", "un", "##likely"])
    text = "unlikely fuelings today"
    scorer = ClassifierScorer(classifier(tokenizer, {"##likely": 0.9, "un": 0.1, "fuel": 0.6, "##s": 0.3}), tokenizer)
    scores = scorer.score([text])[0]
    row = pieces(text)
    assert scores.of_pieces(row, "mean")[0] == pytest.approx(0.5, abs=1e-5)
    assert scores.of_pieces(row, "max")[0] == pytest.approx(0.9, abs=1e-5)
    assert scores.of_pieces(row, "first")[0] == pytest.approx(0.1, abs=1e-5)
    for rate in (0.4, 0.7):
        left = Compressor("llmlingua2", scorer=scorer).compress(text, rate=rate, tokenizer=len).text
        assert set(left.split()) <= set(text.split())


@pytest.mark.parametrize(
    "text",
    [
        "这座城市的图书馆建于上个世纪初。馆内收藏了大量珍贵的手稿和地图。",
        "この町の図書館は百年前に建てられました。",
        "ห้องสมุดของเมืองนี้สร้างขึ้นเมื่อหนึ่งร้อยปีก่อน",
    ],
)
def test_bytes_of_unspaced_scripts_are_scored_by_character(causal: CausalScorer, text: str) -> None:
    result = Compressor("llmlingua", scorer=causal).compress(text, rate=0.5, tokenizer=len)
    assert 0.4 <= result.ratio <= 0.5 and " " not in result.text and "\ufffd" not in result.text


def test_a_sentence_piece_space_belongs_to_the_word_after_it() -> None:
    # offsets of an XLM-R style tokenizer: each token takes the space before it
    row = pieces("old port rebuilt")
    scores = TokenScores.of([(0, 3), (3, 8), (8, 11), (11, 16)], np.array([0.1, 0.9, 0.3, 0.5]))
    np.testing.assert_allclose(scores.of_pieces(row), [0.1, 0.9, 0.4])


def test_digits_are_reserved_as_whole_numbers() -> None:
    text = "The bill of $1,234.56 was sent to the office in the old town on 2024-01-05 for the works of the year"
    result = Compressor("llmlingua2", scorer=Scripted(), keep_digits=True).compress(text, rate=0.3)
    assert "$1,234.56" in result.text and "2024-01-05" in result.text


def test_forced_tokens_stay_and_repeats_in_a_row_go_on_request() -> None:
    text = "one thing ? another ? and more of these ? words to be dropped ? at last"
    options: dict[str, Any] = {"scorer": Scripted(lambda word, prefix: 0.0), "force_tokens": ["?"]}
    assert Compressor("llmlingua2", **options).compress(text, rate=0.3).text.count("?") == 4
    once = Compressor("llmlingua2", drop_consecutive=True, **options).compress(text, rate=0.3).text
    assert "? ?" not in once and "?" in once


def test_any_token_classifier_is_used_by_its_config() -> None:
    tokenizer = wordpiece()
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        id2label={0: "preserve", 1: "drop", 2: "other"}, label2id={"preserve": 0, "drop": 1, "other": 2},
        max_position_embeddings=64,
    )  # fmt: skip
    scorer = ClassifierScorer(BertForTokenClassification(config).eval(), tokenizer)
    assert scorer.label == 0 and scorer.window == 60
    result = Compressor("llmlingua2", scorer=scorer).compress(PROSE * 3, rate=0.5)
    assert 0.47 <= result.ratio <= 0.5


# rankers, combinations


class Encoder:
    def encode(self, texts: Sequence[str]) -> np.ndarray:
        return np.array([[text.count("bread") + text.count("bak"), text.count("ice") + 0.1] for text in texts])


def test_embeddings_and_cross_encoders_rank() -> None:
    assert int(np.argmax(EmbeddingRanker(Encoder()).rank("Who baked the bread?", OTHERS))) == 1
    predict = type(
        "Cross", (), {"predict": lambda self, pairs: [len(set(q.split()) & set(d.split())) for q, d in pairs]}
    )
    assert int(np.argmax(CrossEncoderRanker(predict()).rank("hut at their foot", OTHERS))) == 2
    with pytest.raises(PromptError, match="shape"):
        CrossEncoderRanker(type("Bad", (), {"predict": lambda self, pairs: [[1, 2]] * len(pairs)})()).rank("x", OTHERS)


def test_rankers_without_their_library_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sentence_transformers", None)
    for ranker in (EmbeddingRanker, CrossEncoderRanker):
        with pytest.raises(PromptError, match="pip install"):
            ranker.from_pretrained("some/model")


@pytest.mark.parametrize("method", ["llmlingua", "longllmlingua", "llmlingua2"])
@pytest.mark.parametrize("ranking", ["bm25", "likelihood", "embeddings", "callable"])
def test_any_ranker_works_with_any_method(causal: CausalScorer, method: Any, ranking: str) -> None:
    tokenizer = wordpiece()
    token_scorer = ClassifierScorer(classifier(tokenizer, {"rye": 0.9, "loaves": 0.9}), tokenizer)
    rankers: dict[str, Any] = {
        "bm25": Bm25Ranker(),
        "likelihood": LikelihoodRanker(Scripted(lambda word, prefix: 1.0 if "bakery" in prefix else 4.0)),
        "embeddings": EmbeddingRanker(Encoder()),
        "callable": CallableRanker(lambda question, texts: ["bakery" in text for text in texts]),
    }
    compressor = Compressor(
        method, scorer=token_scorer if method == "llmlingua2" else causal, ranker=rankers[ranking], coarse=1.0
    )
    result = compressor.compress(
        documents=[PROSE, *OTHERS], question="Which loaves did the bakery sell?", rate=0.3, append_question=False
    )
    assert {span.rank for span in result.spans if span.part == 2} == {0}
    assert len(result.documents[2]) >= 0.9 * max(len(text) for text in result.documents)


def test_a_long_prompt_is_ranked_by_passages(causal: CausalScorer) -> None:
    text = PROSE * 6 + OTHERS[1] * 2 + PROSE * 6
    compressor = Compressor("llmlingua", scorer=causal, ranker=Bm25Ranker(), coarse=1.0)
    result = compressor.compress(text, question="What did the bakery sell?", rate=0.1, append_question=False)
    ranks = {span.rank for span in result.kept if span.start > len(PROSE) * 6 and span.start < len(PROSE * 6) + 150}
    assert ranks == {0}


# engine as scorer


def test_an_engines_log_probabilities_are_a_scorer(causal: CausalScorer) -> None:
    def prompt_logprobs(sequences: list[list[int]]) -> list[list[float]]:
        out = []
        for ids in sequences:
            with torch.inference_mode():
                logits = causal.model(torch.tensor([ids])).logits[0].log_softmax(-1)
            out.append([float(logits[i, ids[i + 1]]) for i in range(len(ids) - 1)])
        return out

    engine = EngineScorer(prompt_logprobs, causal.encode, first=causal.first, window=256)
    for texts, prefixes in (([PROSE[:80], "a"], ["x y", ""]), ([PROSE * 2], [""])):
        for ours, theirs in zip(
            engine.score(texts, prefixes=prefixes), causal.score(texts, prefixes=prefixes), strict=True
        ):
            np.testing.assert_allclose(ours.scores, theirs.scores, atol=1e-4)
    without = EngineScorer(prompt_logprobs, causal.encode).score(["abc"])[0]
    assert len(without.scores) == 3
    with pytest.raises(PromptError, match="log-probabilities"):
        EngineScorer(lambda asked: [[0.0]] * len(asked), causal.encode).score([PROSE])


# contract


@pytest.mark.parametrize("method", ["llmlingua", "longllmlingua"])
def test_threads_do_not_disturb_each_other(causal: CausalScorer, method: Any) -> None:
    compressor = Compressor(method, scorer=causal)
    texts = [PROSE, OTHERS[0] * 2, OTHERS[1] * 3, OTHERS[2] * 2]
    alone = [compressor.compress(text, rate=0.5).text for text in texts]
    found: dict[int, str] = {}

    def work(index: int) -> None:
        found[index] = compressor.compress(texts[index % 4], rate=0.5).text

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[index] for index in range(8)] == alone * 2


def test_many_prompts_share_batches_and_equal_single_ones() -> None:
    scorer = Scripted()
    compressor = Compressor("llmlingua2", scorer=scorer)
    texts = [PROSE, OTHERS[0], OTHERS[1] * 2]
    together = [result.text for result in compressor.compress_many(texts, rate=0.4)]
    assert len(scorer.asked) == 1
    assert together == [compressor.compress(text, rate=0.4).text for text in texts]


def test_statistics_of_one_prompt_do_not_depend_on_its_neighbours() -> None:
    texts = [PROSE, PROSE + OTHERS[0], OTHERS[1] * 2]
    together = [result.text for result in Compressor().compress_many(texts, rate=0.4)]
    assert together == [Compressor().compress(text, rate=0.4).text for text in texts]


def test_the_async_wrapper_gives_the_same() -> None:
    async def both() -> list[str]:
        results = await asyncio.gather(*[Compressor().acompress(text, rate=0.5) for text in OTHERS])
        return [result.text for result in results]

    assert asyncio.run(both()) == [Compressor().compress(text, rate=0.5).text for text in OTHERS]


def test_global_random_state_is_left_alone(causal: CausalScorer) -> None:
    torch.manual_seed(5)
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    Compressor("longllmlingua", scorer=causal).compress(documents=[PROSE, *OTHERS], question="x y", rate=0.4)
    assert torch.equal(before, torch.get_rng_state()) and (np.random.get_state()[1] == numpy_before).all()


@pytest.mark.parametrize("method", ["llmlingua", "llmlingua2"])
def test_progress_runs_to_the_end(causal: CausalScorer, method: Any) -> None:
    steps: list[tuple[int, int]] = []
    scorer = causal if method == "llmlingua" else Scripted()
    Compressor(method, scorer=scorer).compress(
        PROSE * (120 if method != "llmlingua" else 3),
        rate=0.5,
        progress=lambda done, total: steps.append((done, total)),
    )
    done = [step[0] for step in steps]
    assert len(steps) > 1 and done == sorted(done) and steps[-1][0] <= steps[-1][1] <= steps[-1][0] * 1.01


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"method": "gpt"}, "method"),
        ({"order": "relevance"}, "order"),
        ({"dynamic": 3}, "dynamic"),
        ({"dynamic": True}, "dynamic"),
        ({"segment": 0}, "segment"),
        ({"coarse": 0.5}, "coarse"),
        ({"aggregate": "median"}, "aggregate"),
        ({"condition": "both"}, "condition"),
        ({"question_rate": -1}, "question_rate"),
        ({"roles": {"tool": "shred"}}, "tool"),
        ({"roles": {"tool": 1.5}}, "tool"),
    ],
)
def test_unknown_options_are_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(PromptError, match=named):
        Compressor(**options)


def test_recovery_gives_the_original_words_with_a_confidence() -> None:
    text = "The keeper of the lamp was Angus Munro, who came from the northern isle of Lewis in the year 1851."
    scorer = Scripted(lambda word, prefix: 9.0 if word[0].isupper() or word.startswith(("keeper", "1851")) else 0.1)
    result = Compressor("llmlingua2", scorer=scorer, keep_rules=False).compress(text, rate=0.5)
    assert "keeper lamp" in result.text or "keeper Angus Munro" in result.text
    found = result.recover("I think the keeper Angus Munro it was, or not.")
    assert "keeper of the lamp was Angus Munro" in found.text and found.text.startswith("I think")
    assert 0.2 < found.matches[0].confidence < 1
    match = found.matches[0]
    assert text[match.source_start : match.source_end] == match.text
    assert result.recover("Nothing of that.").text == "Nothing of that."


@pytest.mark.parametrize("method", ["llmlingua", "longllmlingua", "llmlingua2"])
@pytest.mark.parametrize("given", ["", " \n ", ["", PROSE], [""]])
def test_empty_input_is_no_trouble(causal: CausalScorer, method: Any, given: Any) -> None:
    scorer = Scripted() if method == "llmlingua2" else causal
    assert 0 <= Compressor(method, scorer=scorer).compress(given, rate=0.5).ratio <= 1
