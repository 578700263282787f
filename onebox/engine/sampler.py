"""Logits -> tokens, seeded per request.

The noise that picks a token is a pure function of (seed, position, token id): Gumbel-max sampling with counter-based
noise. So a request's tokens do not depend on batch, draft length or cache state, and a drafter that adds the same noise
to its own logits proposes what the target is most likely to pick (docs/decisions/0001-gumbel-coupling.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onebox.request import SamplingParams, TokenLogprob

_MASK32 = 0xFFFFFFFF


@dataclass(frozen=True)
class SamplingRows:
    """Parameters of R rows of logits, one entry a row. `position` is that of the token to be chosen."""

    temperature: Tensor  # [R] fp32, 0 is greedy
    top_k: Tensor  # [R] int64, 0 keeps all
    top_p: Tensor  # [R] fp32
    min_p: Tensor  # [R] fp32
    seed: Tensor  # [R] int64
    position: Tensor  # [R] int64
    any_random: bool
    any_truncated: bool

    @classmethod
    def of(
        cls, params: Sequence[SamplingParams], seeds: Sequence[int], positions: Sequence[int], device: torch.device
    ) -> SamplingRows:
        def fp32(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        def int64(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        random = [p for p in params if not p.greedy]
        return cls(
            temperature=fp32([0.0 if p.greedy else p.temperature for p in params]),
            top_k=int64([max(p.top_k, 0) for p in params]),
            top_p=fp32([p.top_p for p in params]),
            min_p=fp32([p.min_p for p in params]),
            seed=int64(list(seeds)),
            position=int64(list(positions)),
            any_random=bool(random),
            any_truncated=any(p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0 for p in random),
        )


def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    """logits [R, V] fp32 (after penalties) -> tokens [R] int64. Ties go to the lowest id."""
    greedy = logits.argmax(dim=-1)
    if not rows.any_random:
        return greedy
    scaled = logits / torch.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
    if rows.any_truncated:
        scaled = truncate(scaled, rows)
    noisy = scaled + gumbel_noise(rows.seed, rows.position, logits.shape[1])
    return torch.where(rows.temperature > 0, noisy.argmax(dim=-1), greedy)


def truncate(scaled: Tensor, rows: SamplingRows) -> Tensor:
    """Set to -inf what min_p, top_k and top_p exclude, in that order; the best token always stays.

    scaled [R, V]: logits over temperature. top_k keeps ties with its last token; top_p keeps the smallest set of best
    tokens whose mass, among those top_k left, reaches top_p.
    """
    best = scaled.amax(dim=-1, keepdim=True)
    scaled = scaled.masked_fill(scaled < best + rows.min_p.log()[:, None], float("-inf"))
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    vocab = scaled.shape[1]
    last = torch.where(rows.top_k > 0, rows.top_k, vocab).clamp(max=vocab) - 1
    ordered = ordered.masked_fill(ordered < ordered.gather(1, last[:, None]), float("-inf"))
    mass = ordered.softmax(dim=-1)
    before = mass.cumsum(dim=-1) - mass
    drop = (before >= rows.top_p[:, None]) & (rows.top_p < 1.0)[:, None]
    drop[:, 0] = False
    ordered = ordered.masked_fill(drop, float("-inf"))
    return torch.empty_like(scaled).scatter_(1, order, ordered)


def gumbel_noise(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
    """Standard Gumbel noise [R, vocab] fp32, a pure function of (seed [R], position [R], token id)."""
    key = _mix(_mix((seed & _MASK32) ^ 0x9E3779B9) ^ ((seed >> 32) & _MASK32))
    key = _mix(key ^ _mix((position + 0x85EBCA6B) & _MASK32))
    token = torch.arange(vocab, dtype=torch.int64, device=seed.device)
    bits = _mix(_mix((token[None, :] * 0x9E3779B1 + key[:, None]) & _MASK32) ^ key[:, None])
    # v near 0 means large noise, and there fp32 is at its most precise: tails are right down to 2**-33
    v = (bits.float() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-v))


def _mix(x: Tensor) -> Tensor:
    """A 32-bit finaliser (xor-shift-multiply, Wellons' lowbias32 constants) on int64 lanes."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK32
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK32
    return x ^ (x >> 16)


def penalize(
    logits: Tensor, params: Sequence[SamplingParams], prompt: Sequence[Sequence[int]], output: Sequence[Sequence[int]]
) -> Tensor:
    """Apply logit_bias and the three penalties to logits [R, V], a row a sequence state; a new tensor when any applies.

    repetition_penalty counts prompt and output, presence and frequency count output alone, as vLLM does.
    """
    touched = [
        i
        for i, p in enumerate(params)
        if p.logit_bias or p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1.0
    ]
    if not touched:
        return logits
    logits = logits.clone()
    vocab = logits.shape[1]
    for i in touched:
        p, row = params[i], logits[i]
        if p.repetition_penalty != 1.0:
            seen = torch.tensor(sorted({*prompt[i], *output[i]}), dtype=torch.int64, device=row.device)
            values = row[seen]
            row[seen] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
        if (p.presence_penalty or p.frequency_penalty) and output[i]:
            counts = torch.bincount(torch.tensor(output[i], device=row.device), minlength=vocab)[:vocab]
            row -= counts * p.frequency_penalty + (counts > 0) * p.presence_penalty
        for token, bias in p.logit_bias:
            row[token] += bias
    return logits


def token_logprobs(logits: Tensor, token: int, n_top: int) -> TokenLogprob:
    """Log-probability of `token` under logits [V], and of the `n_top` best tokens, best first."""
    logprobs = logits.float().log_softmax(dim=-1)
    values, ids = logprobs.topk(n_top)
    return TokenLogprob(token, float(logprobs[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))
