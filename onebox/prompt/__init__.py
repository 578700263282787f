"""Text -> shorter text, with reasons. Usable alone: nothing here imports the engine."""

from onebox.prompt.causal import CausalScorer
from onebox.prompt.compressor import CompressedPrompt, Compressor
from onebox.prompt.llmlingua2 import ClassifierScorer
from onebox.prompt.longllmlingua import LikelihoodRanker
from onebox.prompt.ranking import Bm25Ranker, CallableRanker, CrossEncoderRanker, EmbeddingRanker
from onebox.prompt.recovery import Recovered, Recovery
from onebox.prompt.scoring import Ranker, Scorer, StatisticScorer, TokenScores
from onebox.prompt.security import Detector, Guard, Intention, SecurityLingua, Verdict
from onebox.prompt.spans import Span
from onebox.prompt.surprisal import EngineScorer
from onebox.prompt.trace import Trace

__all__ = [
    "Bm25Ranker",
    "CallableRanker",
    "CausalScorer",
    "ClassifierScorer",
    "CompressedPrompt",
    "Compressor",
    "CrossEncoderRanker",
    "Detector",
    "EmbeddingRanker",
    "EngineScorer",
    "Guard",
    "Intention",
    "LikelihoodRanker",
    "Ranker",
    "Recovered",
    "Recovery",
    "Scorer",
    "SecurityLingua",
    "Span",
    "StatisticScorer",
    "TokenScores",
    "Trace",
    "Verdict",
]
