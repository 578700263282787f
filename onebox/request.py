"""The values that travel from server to kernels: SamplingParams -> Request -> Batch, and Output back up.

Nothing here knows text or HTTP, and nothing here computes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from onebox.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor

INT64 = 2**63
FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class SamplingParams:
    """How to choose the next token. Defaults are OpenAI's; out-of-range values raise RequestError naming the field.

    temperature 0 is greedy, and so is anything below 1e-5, where fp32 logits overflow. top_k 0 (or -1) keeps all
    tokens; top_p in (0, 1]; min_p in [0, 1] relative to the best token. With a seed, a request's tokens depend on seed
    and position alone: not on batch, draft length or cache. `logprobs` is the number of alternatives reported beside
    each token (None: no logprobs at all).
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, want: str) -> None:
            if not ok:
                raise RequestError(f"'{name}' must be {want}, got {getattr(self, name)!r}.", param=name)

        check(1 <= self.max_tokens < INT64, "max_tokens", "at least 1 and a 64-bit integer")
        check(0.0 <= self.temperature <= 100.0, "temperature", "between 0 and 100")
        check(-1 <= self.top_k < INT64, "top_k", "-1, 0 (both mean all tokens) or more, and a 64-bit integer")
        check(0.0 < self.top_p <= 1.0, "top_p", "above 0 and at most 1")
        check(0.0 <= self.min_p <= 1.0, "min_p", "between 0 and 1")
        check(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "between -2 and 2")
        check(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "between -2 and 2")
        check(0.0 < self.repetition_penalty <= 100.0, "repetition_penalty", "above 0 and at most 100")
        check(0 <= self.min_tokens <= self.max_tokens, "min_tokens", "between 0 and max_tokens")
        check(self.logprobs is None or 0 <= self.logprobs <= 20, "logprobs", "between 0 and 20")
        check(self.seed is None or -INT64 <= self.seed < INT64, "seed", "a 64-bit integer")
        biases = (bias for _, bias in self.logit_bias)
        check(all(abs(bias) <= 1e4 for bias in biases), "logit_bias", "numbers between -10000 and 10000")

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5


@dataclass(frozen=True)
class Grammar:
    """What an answer must look like, from the token after `start_after` on (None: from its first).

    `source` is the text of a JSON schema, of a regular expression, of a JSON list of strings ("choice"), or of a
    grammar in Lark's or GBNF's notation; nothing for "json_object".
    """

    kind: Literal["json_schema", "json_object", "regex", "grammar", "choice"]
    source: str = ""
    start_after: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Request:
    """One sequence to continue. `prompt` is token ids; `draft_len` None means the engine's own.

    `snapshot_at`: prompt lengths at which a later request is likely to continue (ends of chat turns).
    `cache_salt`: requests share cached prefixes only with the same salt. Lower `priority` runs first.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    draft_len: int | None = None
    snapshot_at: tuple[int, ...] = ()
    cache_salt: str = ""
    grammar: Grammar | None = None


@dataclass(frozen=True)
class TokenLogprob:
    """Natural-log probability of one emitted token and of the best alternatives, best first.

    Of the model's own distribution: before temperature, penalties and truncation.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Output:
    """What one step gave one request: 0..k+1 new tokens, and totals so far.

    The last Output of a request has `finish_reason`; `stop_token` is the id that ended it, and is not in `tokens`.
    `drafted` and `accepted` count draft tokens proposed and kept since the request began; `accepted_per_pos[i]` counts
    the steps in which draft i was kept; `waited_s` is what the request spent in the queue before its first step. With
    finish_reason "error", `refused` says that the request itself is at fault.
    """

    request_id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    error: str | None = None
    refused: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_pos: tuple[int, ...] = ()
    waited_s: float = 0.0


def joined(first: Output, then: Output) -> Output:
    """Two Outputs of one request as one: tokens of both, totals and end of the later."""
    return replace(then, tokens=first.tokens + then.tokens, logprobs=first.logprobs + then.logprobs)


@dataclass(frozen=True)
class Batch:
    """What one forward reads: T token rows of B sequences, rows of a sequence side by side.

    Rows of sequence b are [query_start[b], query_start[b+1]); they stand at positions context_len[b] and up, and their
    K and V go to kv_slot (page * PAGE_SIZE + offset). `commit[b]` rows of the sequence's pending window are applied to
    its recurrent state before this step's rows. A `window` batch (decode, verify) leaves its rows pending; any other
    (prefill) applies them at once.
    """

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    query_start: Tensor  # [B+1] int64
    context_len: Tensor  # [B] int64: tokens before this step's first row
    page_table: Tensor  # [B, P] int64: pages of the sequence in order; unused entries are 0
    kv_slot: Tensor  # [T] int64
    state_slot: Tensor  # [B] int64
    commit: Tensor  # [B] int64
    window: bool
    max_query: int  # most rows of one sequence
    max_context: int  # most tokens of one sequence after this step
