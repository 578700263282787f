"""Turns of a conversation: told from documents, ranked with what stands around them, kept in their order."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from onebox.prompt import Bm25Ranker, Compressor, LikelihoodRanker
from onebox.prompt.longllmlingua import together
from onebox.prompt.ranking import nearby
from onebox.prompt.scoring import StatisticScorer, TokenScores, are_turns

SMALL_TALK = [
    "Ana: Is the coffee machine still broken?",
    "Ben: Yes, and the new one comes on Friday.",
    "Ana: I took the stairs, the lift was slow again.",
    "Cem: My train was late, sorry about that.",
    "Ben: Shall we open a window?",
    "Cem: Fine with me.",
    "Ana: The slides of last week are on the drive.",
    "Ben: Thanks, I have seen them.",
]
TOPIC = [
    "Ana: So, the battery of the remote control.",
    "Ben: Kinetic would be fun but costs too much.",
    "Cem: Then two plain cells, as before.",
    "Ana: Agreed, two plain cells.",
]
QUESTION = "What did they decide about the battery of the remote control?"
MEETING = [*SMALL_TALK * 3, *TOPIC, *SMALL_TALK * 3]
PASSAGES = [
    f"{name}\n{name} is a town on a river. " + "It has a market, a mill and a school, and trains stop there. " * 5
    for name in ("Arden", "Brill", "Corve", "Dunow", "Elsen", "Farne", "Gorst")
]


@pytest.mark.parametrize(
    ("texts", "turns"),
    [
        (MEETING, True),
        ([f"Speaker {n % 2}: " + "a long statement about the budget " * 20 for n in range(8)], True),
        ([f"Topic {n}: " + "a long article about the budget " * 20 for n in range(8)], False),
        (PASSAGES, False),
        (MEETING[:5], False),
        ([], False),
        ([""] * 9, True),
    ],
)
def test_turns_are_told_from_documents(texts: list[str], turns: bool) -> None:
    assert are_turns(texts) is turns


@pytest.mark.parametrize("reach", [1.0, 35.0, 100.0, 1e6])
@pytest.mark.parametrize("lengths", [[10] * 5, [0, 0, 7], [3, 300, 5, 1, 90, 20], [4], []])
def test_what_stands_near_counts_by_distance(lengths: list[int], reach: float) -> None:
    values = np.linspace(0.2, 1.0, len(lengths)) ** 2
    middle = np.cumsum(lengths) - np.array(lengths) / 2
    expected = [sum(v * max(0.0, 1 - abs(a - b) / reach) for b, v in zip(middle, values, strict=True)) for a in middle]
    assert np.allclose(nearby(values, lengths, reach), expected)


def test_the_answer_in_the_turns_after_the_one_that_names_the_subject_is_kept() -> None:
    kept = Compressor().compress(documents=MEETING, question=QUESTION, rate=0.2, append_question=False).text
    assert all(turn in kept for turn in TOPIC)
    alone = Compressor(ranker=Bm25Ranker(around=0))
    assert TOPIC[2] not in alone.compress(documents=MEETING, question=QUESTION, rate=0.2, append_question=False).text


def test_turns_stay_in_their_order_and_documents_go_by_rank() -> None:
    found = Compressor().compress(documents=MEETING, question=QUESTION, rate=0.3, append_question=False).text
    assert [found.index(turn) for turn in TOPIC] == sorted(found.index(turn) for turn in TOPIC)
    asked = "Which river town is Elsen?"
    assert Compressor().compress(documents=PASSAGES, question=asked, rate=0.3).text.startswith("Elsen")
    sort = Compressor(order="sort").compress(documents=MEETING, question=QUESTION, rate=0.3, append_question=False)
    assert sort.text != found


def test_documents_are_ranked_without_their_neighbours() -> None:
    asked = "Which river town is Elsen?"
    assert list(Bm25Ranker().rank(asked, PASSAGES)) == list(Bm25Ranker(around=0).rank(asked, PASSAGES))
    assert list(Bm25Ranker().rank(QUESTION, MEETING)) != list(Bm25Ranker(around=0).rank(QUESTION, MEETING))


@pytest.mark.parametrize("texts", [[], ["one"], ["", ""], ["?!", "..."] * 4])
def test_nothing_to_rank_is_no_trouble(texts: list[str]) -> None:
    assert len(Bm25Ranker(around=100).rank("Why?", texts)) == len(texts)


def test_short_texts_form_stretches() -> None:
    texts = ["a" * 40, "b" * 50, "c" * 30, "d" * 200, "e" * 10]
    assert together(texts, 100) == [(0, 2), (2, 3), (3, 4), (4, 5)]
    assert together([], 100) == []


class Counting:
    """Scores every text by its length, and counts what it is asked."""

    name = "counting"

    def __init__(self) -> None:
        self.asked = 0

    def score(self, texts: Sequence[str], *, prefixes: Sequence[str] | None = None) -> list[TokenScores]:
        self.asked += len(texts)
        return [TokenScores(np.array([0]), np.array([len(text)]), np.array([float(len(text))])) for text in texts]


def test_a_language_model_ranks_turns_by_stretches() -> None:
    scorer = Counting()
    found = LikelihoodRanker(scorer).rank(QUESTION, MEETING)
    assert len(found) == len(MEETING)
    assert scorer.asked * 4 < len(MEETING)


def test_without_a_question_rare_words_of_turns_stay() -> None:
    kept = Compressor().compress(documents=MEETING, rate=0.25).text
    assert {"battery", "Kinetic", "plain"} <= set(kept.replace(",", " ").replace(".", " ").split())
    scores = StatisticScorer().score(MEETING)
    first, again = scores[0].scores, scores[len(SMALL_TALK)].scores
    assert first.mean() > again.mean()


def test_many_threads_get_what_one_gets() -> None:
    compressor = Compressor()
    jobs: list[dict[str, Any]] = [
        {"documents": MEETING, "question": QUESTION, "rate": 0.3},
        {"documents": PASSAGES, "question": "Which river town is Elsen?", "rate": 0.4},
        {"documents": MEETING, "rate": 0.5},
        {"prompt": " ".join(PASSAGES), "target_tokens": 60},
    ]
    expected = [compressor.compress(**job).text for job in jobs]
    found: dict[tuple[int, int], str] = {}

    def work(number: int) -> None:
        for at, job in enumerate(jobs):
            found[number, at] = compressor.compress(**job).text

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found[number, at] == text for number in range(6) for at, text in enumerate(expected))
