"""The original's interface: every argument is taken, its keys come back, and what damaged text there does not here."""

from __future__ import annotations

import copy
import inspect
import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from onebox.errors import PromptError
from onebox.prompt.compat import PromptCompressor
from tests.test_prompt_methods import OTHERS, PROSE, Scripted

KEYS = {"compressed_prompt", "compressed_prompt_list", "origin_tokens", "compressed_tokens", "ratio", "rate", "saving"}
DOCUMENTS = [PROSE, *OTHERS, PROSE.replace("harbour", "airport")]


def words(text: str) -> int:
    return len(text.split())


def lingua(**options: Any) -> PromptCompressor:
    return PromptCompressor(scorer=Scripted(), tokenizer=words, **options)


def test_the_arguments_are_the_originals_in_its_order_with_its_defaults() -> None:
    constructor = inspect.signature(PromptCompressor).parameters
    assert list(constructor)[:7] == [
        "model_name", "device_map", "model_config", "open_api_config",
        "use_llmlingua2", "use_slingua", "llmlingua2_config",
    ]  # fmt: skip
    call = inspect.signature(PromptCompressor.compress_prompt).parameters
    expected = {
        "instruction": "", "question": "", "rate": 0.5, "target_token": -1, "iterative_size": 200,
        "force_context_ids": None, "force_context_number": None, "use_sentence_level_filter": False,
        "use_context_level_filter": True, "use_token_level_filter": True, "keep_split": False, "keep_first_sentence": 0,
        "keep_last_sentence": 0, "keep_sentence_number": 0, "high_priority_bonus": 100, "context_budget": "+100",
        "token_budget_ratio": 1.4, "condition_in_question": "none", "reorder_context": "original",
        "dynamic_context_compression_ratio": 0.0, "condition_compare": False, "add_instruction": False,
        "rank_method": "llmlingua", "concate_question": True, "target_context": -1, "context_level_rate": 1.0,
        "context_level_target_token": -1, "return_word_label": False, "word_sep": "\t\t|\t\t", "label_sep": " ",
        "token_to_word": "mean", "force_reserve_digit": False, "drop_consecutive": False,
    }  # fmt: skip
    assert {name: call[name].default for name in expected} == expected


@pytest.mark.parametrize("use_llmlingua2", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rate": 0.3},
        {"target_token": 40},
        {"use_context_level_filter": False},
        {"use_sentence_level_filter": True},
        {"use_token_level_filter": False, "use_sentence_level_filter": True},
        {"context_budget": "*2"},
        {"iterative_size": 20},
        {"reorder_context": "sort", "rank_method": "longllmlingua"},
        {"reorder_context": "two_stage", "rank_method": "bm25"},
        {"condition_in_question": "after_condition", "condition_compare": True, "rank_method": "longllmlingua"},
        {"condition_in_question": "before", "dynamic_context_compression_ratio": 0.4, "rank_method": "longllmlingua"},
        {"add_instruction": True, "rank_method": "gzip"},
        {"force_tokens": ["?", "."], "drop_consecutive": True, "force_reserve_digit": True, "token_to_word": "first"},
        {"target_context": 2},
        {"context_level_rate": 0.5},
        {"context_level_target_token": 60},
    ],
)
def test_every_argument_works_and_the_keys_are_the_originals(options: dict[str, Any], use_llmlingua2: bool) -> None:
    given = list(DOCUMENTS)
    result = lingua(use_llmlingua2=use_llmlingua2).compress_prompt(
        given, instruction="Answer in one line.", question="What did the bakery sell?", **options
    )
    assert result.keys() >= KEYS and given == DOCUMENTS
    assert result["compressed_prompt"].startswith("Answer in one line.\n\n")
    assert result["compressed_prompt"].endswith("\n\nWhat did the bakery sell?")
    assert result["origin_tokens"] == words(" ".join(DOCUMENTS)) + 9
    assert result["compressed_tokens"] == words(result["compressed_prompt"]) < result["origin_tokens"]
    assert result["ratio"] == f"{result['origin_tokens'] / result['compressed_tokens']:.1f}x"
    assert result["rate"].endswith("%")


def test_rate_counts_everything_and_a_target_the_context() -> None:
    result = lingua().compress_prompt(DOCUMENTS, instruction="Answer briefly.", question="What?", rate=0.4)
    assert 0.34 <= result["compressed_tokens"] / result["origin_tokens"] <= 0.4
    result = lingua().compress_prompt(DOCUMENTS, instruction="Answer briefly.", question="What?", target_token=60)
    assert 54 <= result["compressed_tokens"] - 3 <= 60


def test_forced_contexts_stay_and_the_callers_list_is_untouched() -> None:
    forced = [2]
    result = lingua().compress_prompt(DOCUMENTS, question="harbour storm", force_context_ids=forced, rate=0.3)
    assert forced == [2] and any(span.kept and span.part == 2 for span in result["trace"].spans)


def test_at_most_target_context_contexts_stay() -> None:
    result = lingua(use_llmlingua2=True).compress_prompt(DOCUMENTS, question="Glaciers?", target_context=1, rate=0.5)
    assert {span.part for span in result["trace"].spans if span.kept} == {3}


def test_edge_sentences_stay_when_asked() -> None:
    result = lingua().compress_prompt([PROSE], keep_first_sentence=1, keep_last_sentence=1, rate=0.5)
    text = result["compressed_prompt"]
    assert "The harbour was rebuilt in 1887 after the great storm." in text
    assert "Today the port handles container traffic, ferries and a small marina." in text


def test_sentences_go_whole_without_the_token_filter() -> None:
    text = " ".join(OTHERS)
    kept = lingua().compress_prompt([text], use_token_level_filter=False, use_sentence_level_filter=True, rate=0.7)[
        "compressed_prompt"
    ]
    left = [one.strip() for one in OTHERS if one.strip() in kept]
    assert 0 < len(left) < len(OTHERS) and words(kept) == sum(map(words, left))


@pytest.mark.parametrize(
    ("name", "value"),
    [("force_context_number", 2), ("keep_split", True), ("high_priority_bonus", 5), ("keep_sentence_number", 1)],
)
def test_arguments_that_never_had_an_effect_warn_once(name: str, value: Any) -> None:
    compressor = lingua()
    with pytest.warns(UserWarning, match=name):
        compressor.compress_prompt([PROSE], **{name: value})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compressor.compress_prompt([PROSE], **{name: value})


@pytest.mark.parametrize("budget", ["__import__('os').system('true')", "+1; import os", "**9", "+", ""])
def test_a_budget_is_parsed_and_never_run(budget: str) -> None:
    with pytest.raises(PromptError, match="context_budget"):
        lingua().compress_prompt(DOCUMENTS, context_budget=budget)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rank_method": "openai", "question": "x"}, "rank_method"),
        ({"rank_method": "longllmlingua"}, "question"),
        ({"condition_in_question": "beside", "question": "x"}, "condition_in_question"),
        ({"rate": 1.5}, "rate"),
        ({"force_tokens": ["x"] * 101}, "force_tokens"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(PromptError, match=named):
        lingua().compress_prompt(DOCUMENTS, **options)


def test_code_that_comes_with_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="trust_remote_code"):
        PromptCompressor(str(tmp_path), model_config={"trust_remote_code": True})
    with pytest.raises(PromptError, match="cannot be opened"):
        PromptCompressor(str(tmp_path), device_map="cpu")


@pytest.mark.parametrize("given", ["", [""], ["", PROSE]])
def test_empty_contexts_have_figures(given: Any) -> None:
    assert lingua().compress_prompt(given, target_token=10).keys() >= KEYS


def test_words_come_with_labels() -> None:
    result = lingua(use_llmlingua2=True).compress_prompt([PROSE], return_word_label=True, rate=0.5)
    rows = result["fn_labeled_original_prompt"].split("\t\t|\t\t")
    assert {row.rsplit(" ", 1)[1] for row in rows} == {"0", "1"}
    assert "".join(row.rsplit(" ", 1)[0] for row in rows).replace(" ", "") == PROSE.replace(" ", "")


@pytest.mark.parametrize("use_llmlingua2", [False, True])
def test_protected_segments_are_byte_identical(use_llmlingua2: bool) -> None:
    code = "if a < b && c > d {\n\treturn  <T>x;  }"
    text = f"{PROSE}<llmlingua, compress=False>{code}</llmlingua>{PROSE}<llmlingua, rate=0.2>{OTHERS[0]}</llmlingua>"
    result = lingua(use_llmlingua2=use_llmlingua2).structured_compress_prompt([text], rate=0.5)
    assert code in result["compressed_prompt"] and "llmlingua" not in result["compressed_prompt"]
    assert result["compressed_tokens"] < 0.65 * result["origin_tokens"]


DATA = {
    "id": 987654,
    "profile": {"name": "A < B", "bio": PROSE, "tags": ["x,,y", 'say "hi"', PROSE], "scores": [1, 2.5, None, True]},
    "pair": ("left, right", PROSE),
    "empty": [],
    "note": PROSE,
}
CONFIG = {
    "id": {"rate": 1, "compress": False, "value_type": "int", "pair_remove": False},
    "profile": {
        "name": {"rate": 1, "compress": False, "value_type": "str", "pair_remove": False},
        "bio": {"rate": 0.3, "compress": True, "value_type": "str", "pair_remove": False},
        "tags": {"rate": 0.5, "compress": True, "value_type": "list", "pair_remove": False},
    },
    "pair": {"rate": 0.6, "compress": True, "value_type": "tuple", "pair_remove": False},
    "empty": {"compress": True, "value_type": "list"},
    "note": {"rate": None, "compress": True, "value_type": "str", "pair_remove": True},
}


@pytest.mark.parametrize("use_llmlingua2", [False, True])
def test_json_keeps_types_keys_and_protected_values(use_llmlingua2: bool, tmp_path: Path) -> None:
    before = copy.deepcopy(DATA)
    result = lingua(use_llmlingua2=use_llmlingua2).compress_json(DATA, CONFIG, rate=0.5)
    data = result["compressed_prompt"]
    assert before == DATA and list(data) == list(DATA) and list(data["profile"]) == list(DATA["profile"])
    assert data["id"] == 987654 and data["profile"]["name"] == "A < B" and data["empty"] == []
    assert data["profile"]["scores"] == [1, 2.5, None, True] and isinstance(data["pair"], tuple)
    assert words(data["profile"]["bio"]) <= 0.3 * words(PROSE) < words(data["note"]) <= 0.5 * words(PROSE)
    assert len(data["profile"]["tags"]) == 3
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(CONFIG))
    assert lingua(use_llmlingua2=use_llmlingua2).compress_json(DATA, str(file), rate=0.5)["compressed_prompt"] == data


def test_pairs_may_go_whole_when_asked() -> None:
    data = {f"k{i}": text for i, text in enumerate([*OTHERS, PROSE])}
    config = {key: {"compress": False, "pair_remove": True} for key in data}
    left = lingua().compress_json(data, config, rate=0.3, use_keyvalue_level_filter=True)["compressed_prompt"]
    assert 0 < len(left) < len(data) and all(data[key] == value for key, value in left.items())


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"nothing": {}}, "nothing"),
        ({"id": {"value_type": "str"}}, "value_type"),
        ({"id": {"value_type": "set"}}, "set"),
        ({"note": {"rates": 1}}, "rates"),
        ({"note": {"rate": 7}}, "rate"),
        ({"note": 3}, "note"),
    ],
)
def test_config_mistakes_name_the_field(config: dict[str, Any], named: str) -> None:
    with pytest.raises(PromptError, match=named):
        lingua().compress_json(DATA, config)


def test_recover_takes_plain_strings() -> None:
    original = "The keeper of the lamp was Angus Munro, who came from the northern isle of Lewis."
    found = lingua().recover(original, "keeper lamp Angus Munro Lewis.", "It was keeper lamp Angus Munro, they say.")
    assert found == "It was keeper of the lamp was Angus Munro, they say."


def test_the_intention_comes_from_use_slingua() -> None:
    scorer = Scripted(lambda word, prefix: 0.9 if word in ("make", "bread") else 0.1)
    compressor = PromptCompressor(scorer=scorer, tokenizer=words, use_slingua=True)
    assert (
        compressor.compress_prompt(["Once upon a time tell me to make bread today"])["compressed_prompt"]
        == "make bread"
    )
