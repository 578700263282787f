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
from onebox.prompt.security import Detector, Guard, Intention, SecurityLingua, Verdict
from onebox.prompt.trace import Span, Trace

__all__ = [
    "Bm25Ranker",
    "CallableRanker",
    "CausalScorer",
    "ClassifierScorer",
    "CompressedPrompt",
    "Compressor",
    "Detector",
    "EngineScorer",
    "Guard",
    "Intention",
    "LikelihoodRanker",
    "Ranker",
    "Scorer",
    "SecurityLingua",
    "Span",
    "StatisticScorer",
    "TokenScores",
    "Trace",
    "Verdict",
]
