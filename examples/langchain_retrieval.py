"""A retrieval chain in LangChain whose documents are compressed for the question before the model reads them.

    pip install 'onebox[langchain]' langchain-openai
    python examples/langchain_retrieval.py "Who kept the lighthouse of Varrow?" [--url http://127.0.0.1:8000]

Without --url it serves the bundled test model for itself. That model is tiny: what it says is not to be trusted.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from langchain_classic.retrievers import ContextualCompressionRetriever
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnablePassthrough
from langchain_openai import ChatOpenAI
from passages import passages

from onebox.integrations.langchain import OneboxCompressor
from onebox.prompt import Bm25Ranker, CompressedPrompt


class Bm25Retriever(BaseRetriever):
    """The `k` best of a few documents by BM25; any retriever of LangChain does."""

    documents: list[Document]
    k: int = 20

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        scores = Bm25Ranker().rank(query, [document.page_content for document in self.documents])
        best = sorted(range(len(scores)), key=lambda at: -scores[at])[: self.k]
        return [self.documents[at] for at in best]


def with_sources(documents: Sequence[Document]) -> str:
    return "\n".join(f"[{document.metadata['source']}] {document.page_content}" for document in documents)


def chain(url: str, on_result: Any = None, *, max_tokens: int = 60) -> Any:
    """question -> answer."""
    documents = [Document(text, id=id, metadata=metadata) for id, text, metadata in passages()]
    retriever = ContextualCompressionRetriever(
        base_compressor=OneboxCompressor(rate=0.2, on_result=on_result),
        base_retriever=Bm25Retriever(documents=documents),
    )
    model = ChatOpenAI(
        base_url=url.rstrip("/") + "/v1",
        api_key="none",
        model="tiny",
        max_tokens=max_tokens,
        temperature=0,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )
    prompt = ChatPromptTemplate.from_template("{documents}\n\nAnswer from the text above. {question}")
    inputs = {"documents": retriever | with_sources, "question": RunnablePassthrough()}
    return inputs | prompt | model | StrOutputParser()


def main(argv: Sequence[str] | None = None) -> str:
    parser = argparse.ArgumentParser()
    parser.add_argument("question", nargs="?", default="Who kept the lighthouse of Varrow?")
    parser.add_argument("--url", help="server to ask; left out: the bundled model, served here")
    options = parser.parse_args(argv)

    def tell(result: CompressedPrompt) -> None:
        print(f"{result.original_tokens} -> {result.tokens} tokens of {len(result.documents)} documents")

    if options.url:
        server: Any = nullcontext((options.url, "tiny"))
    else:
        from onebox.cli import make_engine
        from onebox.config import EngineConfig, bundled_model
        from onebox.server.serve import ServeOptions, in_background

        server = in_background(ServeOptions(engine=EngineConfig(bundled_model()), port=0, drain_s=1), make_engine)
    with server as (url, _):
        answer = str(chain(url, tell).invoke(options.question))
    print(answer)
    return answer


if __name__ == "__main__":
    main()
