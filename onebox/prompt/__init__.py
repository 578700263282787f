"""Text -> shorter text, with reasons. Usable alone: nothing here imports the engine."""

from onebox.prompt.compressor import CompressedPrompt, Compressor
from onebox.prompt.scoring import (
    Bm25Ranker,
    CallableRanker,
    CausalScorer,
    ClassifierScorer,
    EngineScorer,
    LikelihoodRanker,
    Ranker,
    Scorer,
    StatisticScorer,
    TokenScores,
)
from onebox.prompt.trace import Span, Trace

__all__ = [
    "Bm25Ranker",
    "CallableRanker",
    "CausalScorer",
    "ClassifierScorer",
    "CompressedPrompt",
    "Compressor",
    "EngineScorer",
    "LikelihoodRanker",
    "Ranker",
    "Scorer",
    "Span",
    "StatisticScorer",
    "TokenScores",
    "Trace",
]
