"""A query engine in LlamaIndex whose nodes are compressed for the question before the model reads them.

    pip install 'onebox[llamaindex]'
    python examples/llamaindex_query.py "Who kept the lighthouse of Varrow?"

The model is the bundled test model, in this process. It is tiny: what it says is not to be trusted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from llama_index.core import get_response_synthesizer
from llama_index.core.llms import CompletionResponse, CompletionResponseGen, CustomLLM, LLMMetadata
from llama_index.core.llms.callbacks import llm_completion_callback
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from passages import passages

from onebox import LLM, SamplingParams
from onebox.config import bundled_model
from onebox.integrations.llamaindex import OneboxPostprocessor
from onebox.prompt import Bm25Ranker, CompressedPrompt


class OfflineModel(CustomLLM):
    """onebox's offline API as a model of LlamaIndex. A server is reached by llama-index-llms-openai-like."""

    llm: Any
    max_tokens: int = 60

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(context_window=8192, num_output=self.max_tokens, model_name="onebox")

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        asked = [{"role": "user", "content": prompt}]
        params = SamplingParams(max_tokens=self.max_tokens, temperature=0)
        found = self.llm.chat(asked, params, chat_template_kwargs={"enable_thinking": False}, progress=False)
        return CompletionResponse(text=found[0].outputs[0].text)

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        yield self.complete(prompt, formatted=formatted, **kwargs)


class Bm25Retriever(BaseRetriever):
    """All nodes with their BM25 scores, best first; any retriever of LlamaIndex does."""

    def __init__(self, nodes: Sequence[TextNode]) -> None:
        super().__init__()
        self.nodes = list(nodes)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        scores = Bm25Ranker().rank(query_bundle.query_str, [node.text for node in self.nodes])
        found = [NodeWithScore(node=node, score=score) for node, score in zip(self.nodes, scores, strict=True)]
        return sorted(found, key=lambda one: -(one.score or 0))


def query_engine(llm: Any, on_result: Any = None) -> RetrieverQueryEngine:
    nodes = [TextNode(text=text, id_=id, metadata=metadata) for id, text, metadata in passages()]
    return RetrieverQueryEngine(
        retriever=Bm25Retriever(nodes),
        response_synthesizer=get_response_synthesizer(
            llm=llm,
            response_mode="compact",
            text_qa_template=PromptTemplate("{context_str}\n\nAnswer from the text above. {query_str}"),
        ),
        node_postprocessors=[OneboxPostprocessor(rate=0.2, on_result=on_result)],
    )


def main(argv: Sequence[str] | None = None) -> str:
    question = " ".join(sys.argv[1:] if argv is None else argv) or "Who kept the lighthouse of Varrow?"

    def tell(result: CompressedPrompt) -> None:
        print(f"{result.original_tokens} -> {result.tokens} tokens of {len(result.documents)} nodes")

    with LLM(bundled_model(), max_model_len=8192) as llm:
        answer = query_engine(OfflineModel(llm=llm), tell).query(question)
    print(answer)
    return str(answer)


if __name__ == "__main__":
    main()
