"""Nodes, scores, ids, metadata, relationships and order survive; the query decides; a query engine works."""

from __future__ import annotations

import asyncio
import copy
import sys
import warnings

import pytest

from examples import example

pytest.importorskip("llama_index.core")
with warnings.catch_warnings():  # its own use of pydantic
    warnings.simplefilter("ignore")
    from llama_index.core.llms import CustomLLM
    from llama_index.core.schema import (
        ImageNode,
        MetadataMode,
        NodeRelationship,
        NodeWithScore,
        QueryBundle,
        RelatedNodeInfo,
        TextNode,
    )

from pydantic import ValidationError

from onebox.integrations.llamaindex import OneboxPostprocessor
from onebox.prompt import CompressedPrompt

QUESTION = "Who kept the lighthouse of Varrow?"


def nodes() -> list[NodeWithScore]:
    """Twenty with falling scores, each with an embedding, a source and a place in its file."""
    return [
        NodeWithScore(
            node=TextNode(
                text=text,
                id_=id,
                metadata=metadata,
                embedding=[float(at), 1.0],
                start_char_idx=10 * at,
                relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id=f"file-{at}")},
                excluded_llm_metadata_keys=["tags"],
            ),
            score=1.0 - at / 40,
        )
        for at, (id, text, metadata) in enumerate(example("passages").passages())
    ]


def but_text(found: NodeWithScore) -> dict:
    values = found.node.model_dump()
    return {"score": found.score, **{k: v for k, v in values.items() if k != "text"}}


def test_scores_ids_metadata_and_order_of_twenty_nodes_survive():
    given = nodes()
    before = copy.deepcopy(given)
    made = OneboxPostprocessor(rate=0.6).postprocess_nodes(given)
    assert len(made) == 20
    assert [but_text(m) for m in made] == [but_text(g) for g in given]
    assert all(type(m.node) is TextNode for m in made)
    assert sum(len(m.node.text) for m in made) < 0.75 * sum(len(g.node.text) for g in given)
    assert given == before


def test_the_query_decides_what_stays():
    question = "Which schooner was launched?"
    made = OneboxPostprocessor(rate=0.06).postprocess_nodes(nodes(), QueryBundle(question))
    texts = {found.node.node_id: found.node.text for found in nodes()}
    assert [m.node.node_id for m in made if m.node.text == texts[m.node.node_id]] == ["varrow-12"]  # the shipyard's
    assert len(made) < 20
    assert made == OneboxPostprocessor(rate=0.06).postprocess_nodes(nodes(), query_str=question)
    assert len(OneboxPostprocessor(rate=0.06, keep_empty=True).postprocess_nodes(nodes(), query_str=question)) == 20


def test_async_is_the_same():
    postprocessor = OneboxPostprocessor(rate=0.2)
    made = asyncio.run(postprocessor.apostprocess_nodes(nodes(), query_str=QUESTION))
    assert made == postprocessor.postprocess_nodes(nodes(), query_str=QUESTION)


def test_nodes_without_text_stay_where_they_are():
    picture = NodeWithScore(node=ImageNode(image_path="harbour.png"), score=0.9)
    given = [nodes()[0], picture, nodes()[1]]
    made = OneboxPostprocessor(rate=0.5).postprocess_nodes(given, query_str=QUESTION)
    assert made[1].node.model_dump() == picture.node.model_dump()
    assert OneboxPostprocessor().postprocess_nodes([picture]) == [picture]
    assert OneboxPostprocessor().postprocess_nodes([]) == []


def test_a_node_left_whole_equals_the_one_given():
    made = OneboxPostprocessor(rate=1.0).postprocess_nodes(nodes(), query_str=QUESTION)
    assert made == nodes()
    assert made[0].node.get_content(MetadataMode.LLM) == nodes()[0].node.get_content(MetadataMode.LLM)


def test_limits_hold_and_reasons_are_told():
    seen: list[CompressedPrompt] = []
    OneboxPostprocessor(target_tokens=100, on_result=seen.append).postprocess_nodes(nodes(), query_str=QUESTION)
    assert 95 <= seen[0].tokens <= 100 and any(span.rule for span in seen[0].dropped)


def test_options_that_are_not_known_are_refused():
    with pytest.raises(ValidationError):
        OneboxPostprocessor(ratio=0.5)


def test_the_query_engine_of_the_example_reads_short_nodes():
    module = example("llamaindex_query")
    seen: list[str] = []

    class Echo(CustomLLM):
        @property
        def metadata(self):
            return module.LLMMetadata(context_window=8192, num_output=60)

        def complete(self, prompt, formatted=False, **kwargs):
            seen.append(prompt)
            return module.CompletionResponse(text="Ines Okafor")

        def stream_complete(self, prompt, formatted=False, **kwargs):
            yield self.complete(prompt)

    response = module.query_engine(Echo()).query(QUESTION)
    assert str(response) == "Ines Okafor"
    assert "Ines Okafor from 1911" in seen[0] and "Petrel" not in seen[0]
    assert response.source_nodes[0].node.node_id == "varrow-01"
    assert response.source_nodes[0].score is not None


@pytest.mark.slow
def test_the_bundled_model_answers_through_the_postprocessor(capsys):
    assert "Ines Okafor" in example("llamaindex_query").main([QUESTION])
    assert "tokens of 20 nodes" in capsys.readouterr().out


def test_without_llamaindex_the_error_names_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_index", None)
    for name in [name for name in sys.modules if name.startswith("llama_index.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "onebox.integrations.llamaindex")
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'onebox\[llamaindex\]'"):
        import onebox.integrations.llamaindex  # noqa: F401
