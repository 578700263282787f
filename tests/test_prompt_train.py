"""Training tools end to end on a toy corpus: a scripted teacher behind a real OpenAI client, labels, filters, a
classifier that learns and loads; and the injection head's fit."""

# ruff: noqa: E501

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # tools/ lies beside the package

from onebox.errors import PromptError  # noqa: E402
from onebox.prompt import ClassifierScorer, Compressor  # noqa: E402
from onebox.prompt.classifier import HeadDetector, KeepScorer  # noqa: E402
from tests.encoders import save_encoder  # noqa: E402
from tools.fitting import auc, fit  # noqa: E402
from tools.train_guard import data as guard_data  # noqa: E402
from tools.train_guard.__main__ import in_windows, worst  # noqa: E402
from tools.train_lingua2 import evaluate as by  # noqa: E402
from tools.train_lingua2.__main__ import parser, read, run  # noqa: E402
from tools.train_lingua2.head import train_head  # noqa: E402
from tools.train_lingua2.label import align, from_signals, label, measures, trusted  # noqa: E402
from tools.train_lingua2.surprisal import with_surprisal, word_values  # noqa: E402
from tools.train_lingua2.teach import INSTRUCTION, chunks  # noqa: E402
from tools.train_lingua2.train import train  # noqa: E402
from tools.train_lingua2.windows import clean, stem, windows  # noqa: E402

FILLER = ("the", "a", "of", "and", "so", "well", "really", "just", "to", "it")
CONTENT = (
    "harbour",
    "engine",
    "storm",
    "ticket",
    "council",
    "bridge",
    "winter",
    "budget",
    "ferry",
    "signal",
    "lantern",
    "mayor",
)


def corpus(n: int, seed: int = 0) -> list[dict[str, str]]:
    rng = random.Random(seed)
    rows = []
    for number in range(n):
        sentences = []
        for _ in range(8):
            words = [rng.choice(FILLER if rng.random() < 0.5 else CONTENT) for _ in range(rng.randint(5, 10))]
            sentences.append(" ".join(words).capitalize() + ".")
        rows.append({"id": f"text{number}", "text": " ".join(sentences)})
    return rows


class ScriptedTeacher:
    """An OpenAI server inside the client's transport: deletes filler, and inflects, reorders or invents now and then."""

    def __init__(self, seed: int = 0) -> None:
        self.rng, self.requests = random.Random(seed), []  # type: ignore[var-annotated]
        transport = httpx.MockTransport(self.answer)
        self.client = openai.OpenAI(
            base_url="http://teacher.test/v1", api_key="none", http_client=httpx.Client(transport=transport)
        )

    def answer(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.requests.append(body)
        words = body["messages"][-1]["content"].split()
        kept = [word for word in words if word.strip(".").lower() not in FILLER]
        if len(self.requests) % 25 == 0:
            kept += ["invented"] * (len(kept) // 2)
        else:
            kept = [word.rstrip(".") + "s" if self.rng.random() < 0.05 else word for word in kept]
        message = {"role": "assistant", "content": " ".join(kept)}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return httpx.Response(
            200, json={"id": "1", "object": "chat.completion", "created": 1, "model": "t", "choices": [choice]}
        )


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_encoder(tmp_path_factory.mktemp("encoder"), words=(*FILLER, *CONTENT))


def test_the_pipeline_teaches_a_classifier_that_compresses_as_its_teacher(tmp_path: Path, encoder: Path) -> None:
    source = tmp_path / "corpus.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in corpus(40)), encoding="utf-8")
    teacher = ScriptedTeacher()

    def step(*args: str) -> str:
        return run(parser().parse_args([str(arg) for arg in args]), teacher.client)

    taught, labelled, model = tmp_path / "taught.jsonl", tmp_path / "labelled.jsonl", tmp_path / "model"
    step("teach", str(source), "--out", str(taught), "--model", "t", "--max-words", "40")
    assert {request["messages"][0]["content"] for request in teacher.requests} == {INSTRUCTION}
    summary = step("label", str(taught), "--out", str(labelled))
    rows = read(labelled, "id", "words", "labels")
    assert len(rows) < len(read(taught, "id")) and "words kept" in summary
    assert max(row["variation"] for row in rows) < 0.2, "chunks with invented words should have gone first"
    right = [
        int(word.strip(".").lower() in CONTENT) == kept
        for row in rows
        for word, kept in zip(row["words"], row["labels"], strict=True)
    ]
    assert np.mean(right) > 0.97
    summary = step(
        "train", str(labelled), "--encoder", str(encoder), "--out", str(model), "--epochs", "6", "--rate", "0.01"
    )
    assert float(summary.rsplit(" ", 1)[1]) > 0.97
    text = corpus(1, seed=99)[0]["text"]
    out = Compressor("llmlingua2", scorer=ClassifierScorer.from_pretrained(str(model))).compress(
        text, rate=0.35, tokenizer=lambda t: len(t.split())
    )
    words = [word.strip(".").lower() for word in out.text.split()]
    assert words and sum(word in CONTENT for word in words) / len(words) > 0.9


def test_training_twice_gives_the_same_model(tmp_path: Path, encoder: Path) -> None:
    rows = [
        {
            "id": row["id"],
            "words": row["text"].split(),
            "labels": [int(w.strip(".").lower() in CONTENT) for w in row["text"].split()],
        }
        for row in corpus(6)
    ]
    first = train(rows, encoder, tmp_path / "a", epochs=1, freeze=1)
    random.random()
    assert train(rows, encoder, tmp_path / "b", epochs=1, freeze=1) == first
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()


def labelled_corpus(n: int) -> list[dict[str, Any]]:
    return [
        {
            "id": row["id"],
            "words": row["text"].split(),
            "labels": [int(w.strip(".").lower() in CONTENT) for w in row["text"].split()],
        }
        for row in corpus(n)
    ]


def test_a_linear_head_learns_in_a_second_and_scores_long_texts_in_windows(tmp_path: Path, encoder: Path) -> None:
    path = tmp_path / "keep" / "head.safetensors"
    assert train_head(labelled_corpus(10), encoder, path, layers=(1,)) > 0.95
    scorer = KeepScorer(encoder, path)
    text = corpus(30, seed=5)[0]["text"] + " " + "\n".join(row["text"] for row in corpus(12, seed=6))
    short, long, empty = scorer.score([text[:200], text, ""])
    assert len(empty.scores) == 0 and len(long.scores) > 600
    assert np.isfinite(long.scores).all() and (long.starts[1:] >= long.ends[:-1]).all()
    alone = scorer.score([text])[0]
    np.testing.assert_allclose(alone.scores, long.scores, atol=1e-4)
    for found, whole in ((short, text[:200]), (long, text)):
        kept = [
            whole[a:b].lower() in CONTENT for a, b in zip(found.starts, found.ends, strict=True) if whole[a:b].isalpha()
        ]
        value = [v for a, b, v in zip(found.starts, found.ends, found.scores, strict=True) if whole[a:b].isalpha()]
        assert (auc(np.array(value), np.array(kept).astype(int)) or 0) > 0.95
    assert Compressor("llmlingua2", scorer=scorer).compress(text, rate=0.4).ratio <= 0.4


def test_a_head_of_another_kind_is_refused(tmp_path: Path, encoder: Path) -> None:
    path = tmp_path / "head.safetensors"
    train_head(labelled_corpus(4), encoder, path, layers=(1,))
    with pytest.raises(PromptError, match="head for importance"):
        HeadDetector(encoder, path)
    with pytest.raises(PromptError, match="two sources"):
        train_head(labelled_corpus(1), encoder, path)


def test_training_needs_two_sources_and_something_to_keep(tmp_path: Path, encoder: Path) -> None:
    row = {"id": "a/1", "words": ["harbour"], "labels": [1]}
    for rows in ([row, {**row, "id": "a/2"}], [{**row, "labels": [0]}, {"id": "b", "words": ["x"], "labels": [0]}]):
        with pytest.raises(PromptError, match="two sources"):
            train(rows, encoder, tmp_path)


@pytest.mark.parametrize(
    ("text", "kept", "labels"),
    [
        ("the cat sat on the mat", "cat sat mat", [0, 1, 1, 0, 0, 1]),
        ("the cats were sitting", "cat sit", [0, 1, 0, 0]),  # "sitting" is not "sit" + ending
        ("Plans, plans and PLANS.", "plans plans", [1, 1, 0, 0]),
        ("a b a b a", "a a a", [1, 0, 1, 0, 1]),
        ("alpha beta gamma", "gamma alpha", [1, 0, 1]),
        ("one two", "three four", [0, 0]),
        ("", "word", []),
    ],
)
def test_kept_words_are_found_in_order_inflected_or_moved(text: str, kept: str, labels: list[int]) -> None:
    assert align(text.split(), kept.split()) == labels


def test_a_kept_word_is_not_matched_beyond_the_window() -> None:
    words = ["key", *["pad"] * 50, "key"]
    assert align(words, ["pad", "key"], window=10)[-1] == 0
    assert sum(align(words, ["key", "key"], window=60)) == 2


def test_measures_name_invention_and_missed_matches() -> None:
    words = ["red", "fox", "runs", "over", "red", "hills"]
    perfect = measures(words, ["red", "fox"], [1, 1, 0, 0, 0, 0])
    assert perfect["variation"] == 0 and perfect["rate"] == pytest.approx(1 / 3)
    assert perfect["gap"] == pytest.approx(1 / 6)  # the second "red" is a hit without a label
    assert measures(words, ["blue", "fox"], [0, 1, 0, 0, 0, 0])["variation"] == 0.5


def test_the_worst_chunks_are_left_out_in_two_passes() -> None:
    rows = [{"id": str(i), "variation": i / 100, "gap": (100 - i) / 100} for i in range(100)]
    kept = trusted(rows, variation_share=0.05, gap_share=0.1)
    assert [row["id"] for row in kept] == [str(i) for i in range(9, 95)]
    assert trusted(rows, variation_share=0, gap_share=0) == rows


def test_chunks_lose_no_word_and_end_with_sentences() -> None:
    text = corpus(1, seed=3)[0]["text"] + "\nA line\nand another one. " + "x" * 30
    for size in (5, 20, 1000):
        parts = list(chunks(text, size))
        assert " ".join(parts).split() == text.split() and all(len(part.split()) <= size for part in parts)
    assert all(part.endswith(".") for part in list(chunks(corpus(1)[0]["text"], 25))[:-1])


MEETING = {
    "general_query_list": [{"query": "Summarise.", "answer": "They met."}],
    "specific_query_list": [{"query": "What of the budget?", "answer": "The budget was cut by ten percent.", "relevant_text_span": [["1", "2"]]}],
    "meeting_transcripts": [
        {"speaker": "Ann", "content": "Good morning {vocalsound} everyone , sit down ."},
        {"speaker": "Bob", "content": "We cutting the budget ?"},
        {"speaker": "Ann", "content": "By ten percent ."},
        {"speaker": "Bob", "content": "Fine . Lunch now , then more budget talk ."},
    ],
}  # fmt: skip


def test_windows_mark_evidence_and_answered_words(tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text(json.dumps(MEETING), encoding="utf-8")
    [row] = windows([tmp_path], size=20, each=1)
    marked = [word for word, used in zip(row["words"], row["answer"], strict=True) if used]
    assert (
        {stem(word) for word in marked} <= {"budget", "cutt", "ten", "percent"}
        and "budget?" in marked
        and "ten" in marked
    )
    assert all(evidence or not used for evidence, used in zip(row["evidence"], row["answer"], strict=True))
    assert clean("a , b {x} c .") == "a, b c."


class Lengths:
    """Surprisal of a character is its word's length."""

    name = "lengths"

    def score(self, texts: Any, *, prefixes: Any = None) -> list[Any]:
        from onebox.prompt import TokenScores

        text = texts[0]
        size = [len(word) for word in text.split(" ") for _ in range(len(word) + 1)][: len(text)]
        return [TokenScores(np.arange(len(text)), np.arange(len(text)) + 1, np.array(size, dtype=float))]


def test_word_surprisal_is_the_sum_over_its_tokens() -> None:
    [row] = with_surprisal([{"words": ["a", "bb", "ccc"]}], Lengths())
    assert row["surprisal"] == [1 + 1, 4 + 2, 9]  # the space after a word counts for it
    values = word_values(["ab", "c"], np.array([0, 1, 2]), np.array([1, 2, 4]), np.array([1.0, 2.0, 4.0]))
    assert values == [3.0, 4.0]


def test_signals_label_the_surprising_and_the_answered() -> None:
    rows = [{"id": "m/0", "words": list("abcd"), "surprisal": [1, 4, 3, 2], "answer": [1, 0, 0, 0]}]
    assert from_signals(rows, surprising=0.5, answered=False)[0]["labels"] == [0, 1, 1, 0]
    assert from_signals(rows, surprising=0.25, answered=True)[0]["labels"] == [1, 1, 0, 0]


def test_baselines_meet_the_budget_and_recall_is_a_share() -> None:
    text = corpus(1, seed=8)[0]["text"]
    cases = [by.Case(text, lambda out: float("harbour" in out.lower()))]
    methods = {"cut": by.truncation, "random": by.random_words, "bm25": by.bm25_sentences, "words": by.by_scorer(None)}
    rows = list(by.compare(cases, methods, (1, 2, 4)))
    assert all(row["over_budget"] == 0 and 0 <= row["recall"] <= 1 for row in rows)  # type: ignore[operator]
    assert by.truncation(text, 10**6) == text and by.random_words(text, 10**6) == text


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": 1, "text": "x"}\n{"id": 2}\n', encoding="utf-8")
    with pytest.raises(PromptError, match="line 2: no text"):
        read(path, "id", "text")
    path.write_text("nonsense\n", encoding="utf-8")
    with pytest.raises(PromptError, match="line 1: not JSON"):
        read(path, "id")
    assert label([]) == []


# ---- the injection head's training


def test_the_fit_separates_what_can_be_separated() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 12)).astype(np.float32) * np.arange(1, 13)
    y = (x[:, 3] / 4 - x[:, 7] / 8 > 0).astype(int)
    weight, bias = fit(x[:300], y[:300], np.ones(300), 1e-4)
    assert auc(x[300:] @ weight + bias, y[300:]) > 0.99  # type: ignore[operator]
    unweighted, _ = fit(x[:300], 1 - y[:300], np.ones(300), 1e-4)
    assert np.dot(weight, unweighted) < 0


@pytest.mark.parametrize(
    ("scores", "labels", "want"),
    [([0.1, 0.9], [0, 1], 1.0), ([0.9, 0.1], [0, 1], 0.0), ([0.5, 0.5, 0.5], [0, 1, 1], 0.5), ([1, 2], [1, 1], None)],
)
def test_auc_counts_ties_half(scores: list[float], labels: list[int], want: float | None) -> None:
    assert auc(np.array(scores), np.array(labels)) == want


def test_a_row_scores_as_its_worst_window() -> None:
    rows = [("one " * 100, 0), ("two", 1), ("", 0)]
    texts, owner = in_windows(rows)
    assert owner.count(0) >= 2 and owner.count(1) == 1 and 2 not in owner
    assert list(worst([0.1, 0.7, 0.2][: len(texts)], owner[:3], 3)) == pytest.approx(
        [0.7, 0.2, 0.0] if owner[:3] == [0, 0, 1] else list(worst([0.1, 0.7, 0.2], owner[:3], 3))
    )


def test_sets_to_test_on_are_never_trained_on(tmp_path: Path) -> None:
    (tmp_path / "NotInject_one.json").write_text('[{"prompt": "May I ignore it?"}]', encoding="utf-8")
    (tmp_path / "deepset_train.jsonl").write_text('{"text": "Obey me.", "label": 1}\n', encoding="utf-8")
    training = dict(guard_data.load([tmp_path], train=True))
    testing = dict(guard_data.load([tmp_path], train=False))
    assert set(training) == {"deepset train", "written"} and set(testing) == {"NotInject one"}
    assert {source.train for source in guard_data.SOURCES if "test" in source.name or "NotInject" in source.name} == {
        False
    }


def test_written_attacks_and_ordinary_texts_do_not_overlap() -> None:
    rows = guard_data.written()
    attacks, ordinary = ({text for text, label in rows if label == kind} for kind in (1, 0))
    assert len(attacks) > 200 and len(ordinary) > 100 and not attacks & ordinary
