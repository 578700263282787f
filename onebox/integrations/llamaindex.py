"""LlamaIndex: a node postprocessor. Takes nodes with scores and a query, gives them with shorter texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onebox.prompt import CompressedPrompt, Compressor

try:
    from llama_index.core.postprocessor.types import BaseNodePostprocessor
    from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle
    from pydantic import ConfigDict, Field, model_validator
except ModuleNotFoundError as e:
    raise ModuleNotFoundError(
        f"onebox.integrations.llamaindex needs LlamaIndex ({e}); install it with: pip install 'onebox[llamaindex]'",
        name=e.name,
    ) from e


class OneboxPostprocessor(BaseNodePostprocessor):
    """Shortens retrieved nodes for a query: `index.as_query_engine(node_postprocessors=[OneboxPostprocessor()])`.

    Nodes keep their order, class, scores, ids, metadata, relationships and embeddings; only their text is shorter. One
    of which nothing is left is left out, unless `keep_empty`; one that had no text (an image) stays. Those given are
    never changed. Without a query, texts are shortened by themselves.

    rate, target_tokens,  as in `Compressor.compress`; rate is 0.5 where neither target_tokens nor max_tokens is given
    max_tokens
    max_documents         at most so many nodes with text, the most relevant ones
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
    keep_empty: bool = False
    tokenizer: Any = Field(default=None, exclude=True)
    compressor: Compressor = Field(default_factory=Compressor, exclude=True)
    on_result: Callable[[CompressedPrompt], None] | None = Field(default=None, exclude=True)

    @model_validator(mode="after")
    def _default_rate(self) -> OneboxPostprocessor:
        if self.rate is None and self.target_tokens is None and self.max_tokens is None:
            self.rate = 0.5
        return self

    @classmethod
    def class_name(cls) -> str:
        return "OneboxPostprocessor"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        texts = [found.node.get_content(MetadataMode.NONE) for found in nodes]
        told = [text for text in texts if text]
        if not told:
            return list(nodes)
        result = self.compressor.compress(
            documents=told,
            question=(query_bundle.query_str or None) if query_bundle else None,
            append_question=False,
            rate=self.rate,
            target_tokens=self.target_tokens,
            max_tokens=self.max_tokens,
            max_documents=self.max_documents,
            tokenizer=self.tokenizer,
        )
        if self.on_result is not None:
            self.on_result(result)
        left = iter(result.documents)
        short = [next(left) if text else text for text in texts]
        return [
            self._with_text(found, text)
            for found, before, text in zip(nodes, texts, short, strict=True)
            if self.keep_empty or not before or text.strip()
        ]

    @staticmethod
    def _with_text(found: NodeWithScore, text: str) -> NodeWithScore:
        node = found.node.model_copy(deep=True)
        if text != node.get_content(MetadataMode.NONE):
            node.set_content(text)
        return NodeWithScore(node=node, score=found.score)
