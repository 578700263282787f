"""Documents, ids, metadata and order survive; the query decides; retrievers, chains and the example work."""

from __future__ import annotations

import asyncio
import copy
import sys

import pytest
from serving import app_of, running, saying

from examples import example

pytest.importorskip("langchain_classic")

from langchain_classic.retrievers import ContextualCompressionRetriever
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import ValidationError

from onebox.errors import PromptError
from onebox.integrations.langchain import OneboxCompressor
from onebox.prompt import CompressedPrompt, Compressor

QUESTION = "Who kept the lighthouse of Varrow?"


def documents() -> list[Document]:
    return [Document(text, id=id, metadata=metadata) for id, text, metadata in example("passages").passages()]


class Fixed(BaseRetriever):
    """Always the same documents."""

    found: list[Document]

    def _get_relevant_documents(self, query, *, run_manager):
        return self.found


def words(text: str) -> list[str]:
    return text.split()


def is_part_of(short: str, long: str) -> bool:
    """Whether the words of `short` stand in `long` in their order, punctuation aside."""
    rest = iter(word.strip(".,") for word in words(long))
    return all(word.strip(".,") in rest for word in words(short))


def test_ids_metadata_and_order_of_twenty_documents_survive():
    given = documents()
    before = copy.deepcopy(given)
    made = OneboxCompressor(rate=0.6).compress_documents(given, "")
    assert [d.id for d in made] == [d.id for d in given] and len(made) == 20
    assert [d.metadata for d in made] == [d.metadata for d in given]
    assert all(is_part_of(d.page_content, g.page_content) for d, g in zip(made, given, strict=True))
    assert sum(len(words(d.page_content)) for d in made) < 0.7 * sum(len(words(d.page_content)) for d in given)
    assert given == before


def test_metadata_of_a_result_is_its_own():
    given = documents()
    OneboxCompressor(rate=0.6).compress_documents(given, QUESTION)[0].metadata["seen"] = True
    assert "seen" not in given[0].metadata


def test_the_query_decides_what_stays():
    kept = {}
    for question, name in ((QUESTION, "Okafor"), ("Which schooner was launched for the tea trade?", "Petrel")):
        made = OneboxCompressor(rate=0.1).compress_documents(documents(), question)
        kept[name] = " ".join(d.page_content for d in made)
    assert "Okafor" in kept["Okafor"] and "Petrel" not in kept["Okafor"]
    assert "Petrel" in kept["Petrel"] and "Okafor" not in kept["Petrel"]


def test_the_order_is_the_retrievers_not_the_ranking():
    made = OneboxCompressor(rate=0.6).compress_documents(documents()[::-1], QUESTION)
    assert [d.id for d in made] == sorted((d.id for d in made), reverse=True)


def test_documents_of_which_nothing_is_left_go_unless_kept():
    few = OneboxCompressor(rate=0.1).compress_documents(documents(), QUESTION)
    all_of_them = OneboxCompressor(rate=0.1, keep_empty=True).compress_documents(documents(), QUESTION)
    assert 0 < len(few) < 20 == len(all_of_them)
    assert [d for d in all_of_them if d.page_content.strip()] == few


def test_a_subclass_of_document_stays_one():
    class Page(Document):
        number: int = 0

    made = OneboxCompressor(rate=1.0).compress_documents([Page(page_content="One two three.", number=7)], "two?")
    assert isinstance(made[0], Page) and made[0].number == 7 and made[0].page_content == "One two three."


def test_limits_in_tokens_and_documents_hold():
    seen: list[CompressedPrompt] = []
    OneboxCompressor(target_tokens=100, on_result=seen.append).compress_documents(documents(), QUESTION)
    assert 95 <= seen[0].tokens <= 100
    assert any(span.rule for span in seen[0].dropped)
    assert len(OneboxCompressor(max_documents=3).compress_documents(documents(), QUESTION)) == 3
    assert OneboxCompressor(max_tokens=100_000).compress_documents(documents(), QUESTION) == documents()


def test_no_documents_are_no_error():
    assert OneboxCompressor().compress_documents([], QUESTION) == []


@pytest.mark.parametrize("value", [{"ratio": 0.5}, {"rate": "much"}])
def test_options_that_are_not_known_are_refused(value):
    with pytest.raises(ValidationError):
        OneboxCompressor(**value)


def test_a_target_below_what_is_protected_is_an_error_that_says_so():
    code = Document("```python\n" + "value = compute(value)\n" * 50 + "```")
    with pytest.raises(PromptError, match="protected"):
        OneboxCompressor(target_tokens=5).compress_documents([code], "value?")


def test_another_compressor_takes_the_place_of_bm25():
    by_length = Compressor(
        ranker=type("Longest", (), {"name": "longest", "rank": lambda s, q, d: [len(t) for t in d]})()
    )
    given = [Document("short one."), Document("a much longer second document, which says little of use to anybody.")]
    made = OneboxCompressor(rate=0.9, compressor=by_length).compress_documents(given, "short one?")
    assert made[-1].page_content == given[1].page_content


@pytest.mark.parametrize("how", ["invoke", "ainvoke"])
def test_it_works_inside_the_compression_retriever(how):
    retriever = ContextualCompressionRetriever(
        base_compressor=OneboxCompressor(rate=0.2), base_retriever=Fixed(found=documents())
    )
    found = retriever.invoke(QUESTION) if how == "invoke" else asyncio.run(retriever.ainvoke(QUESTION))
    assert found[0].id == "varrow-01" and "Ines Okafor" in found[0].page_content
    assert found[0].metadata["source"] == "guide/lighthouse.txt"
    assert list(found) == list(OneboxCompressor(rate=0.2).compress_documents(documents(), QUESTION))


def test_the_example_answers_through_a_server(capsys):
    engine = saying("Ines Okafor kept it.")
    with running(app_of(engine)) as url:
        answer = example("langchain_retrieval").main([QUESTION, "--url", url])
    assert answer == "Ines Okafor kept it."
    assert "tokens of 20 documents" in capsys.readouterr().out
    assert len(engine.requests) == 1 and len(engine.requests[0].prompt) < 800  # of 2,600 with all twenty documents


@pytest.mark.slow
def test_the_bundled_model_answers_through_the_compressor():
    assert "Ines Okafor" in example("langchain_retrieval").main([QUESTION])


def test_without_langchain_the_error_names_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "langchain_core", None)
    for name in [name for name in sys.modules if name.startswith("langchain_core.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "onebox.integrations.langchain")
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'onebox\[langchain\]'"):
        import onebox.integrations.langchain  # noqa: F401
