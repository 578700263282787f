"""LangChain: a document compressor for retrievers. Takes Documents and a query, gives Documents with shorter texts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from onebox.prompt import CompressedPrompt, Compressor

try:
    from langchain_core.callbacks import Callbacks
    from langchain_core.documents import BaseDocumentCompressor, Document
    from pydantic import ConfigDict, Field, model_validator
except ModuleNotFoundError as e:
    raise ModuleNotFoundError(
        f"onebox.integrations.langchain needs LangChain ({e}); install it with: pip install 'onebox[langchain]'",
        name=e.name,
    ) from e


class OneboxCompressor(BaseDocumentCompressor):
    """Shortens retrieved Documents for a query, for `ContextualCompressionRetriever` or by itself.

    Documents keep their order, ids, metadata and class; only `page_content` is shorter. One of which nothing is left is
    left out, unless `keep_empty`. Those given are never changed. Without a query, texts are shortened by themselves.

    rate, target_tokens,  as in `Compressor.compress`; rate is 0.5 where neither target_tokens nor max_tokens is given
    max_tokens
    max_documents         at most so many documents, the most relevant ones
    tokenizer             what tokens are: tiktoken's, transformers' or tokenizers' object, or a function of text
    compressor            method, scorer and ranker; left out: BM25, which needs no model
    on_result             called with each CompressedPrompt: tokens saved, and the reason for every dropped piece

    Raises PromptError, as `Compressor.compress` does.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    rate: float | None = None
    target_tokens: int | None = None
    max_tokens: int | None = None
    max_documents: int | None = None
    tokenizer: Any = None
    keep_empty: bool = False
    compressor: Compressor = Field(default_factory=Compressor)
    on_result: Callable[[CompressedPrompt], None] | None = None

    @model_validator(mode="after")
    def _default_rate(self) -> OneboxCompressor:
        if self.rate is None and self.target_tokens is None and self.max_tokens is None:
            self.rate = 0.5
        return self

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        """The Documents with what is left of their texts, in the order given."""
        if not documents:
            return []
        result = self.compressor.compress(
            documents=[document.page_content for document in documents],
            question=query or None,
            append_question=False,
            rate=self.rate,
            target_tokens=self.target_tokens,
            max_tokens=self.max_tokens,
            max_documents=self.max_documents,
            tokenizer=self.tokenizer,
        )
        if self.on_result is not None:
            self.on_result(result)
        return [
            document.model_copy(update={"page_content": text, "metadata": dict(document.metadata)})
            for document, text in zip(documents, result.documents, strict=True)
            if self.keep_empty or text.strip()
        ]

    async def acompress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        """`compress_documents` in a worker thread."""
        return await asyncio.to_thread(self.compress_documents, documents, query, callbacks)
