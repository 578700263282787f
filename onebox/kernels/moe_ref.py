"""Routing and experts, as plain mathematics."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def route_ref(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Softmax, best `top_k`, renormalised. logits [T, E] -> (weights [T, top_k] fp32, experts [T, top_k] int64)."""
    weights, experts = logits.float().softmax(-1).topk(top_k, dim=-1)
    return weights / weights.sum(-1, keepdim=True), experts


def experts_ref(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """Weighted sum of the chosen experts' SwiGLU. x [T, H], gate_up [E, 2I, H], down [E, H, I] -> [T, H]."""
    if experts.numel() <= 8:  # few rows: one batched product a matrix beats a loop over experts
        hidden = torch.einsum("tkih,th->tki", gate_up[experts], x)
        gate, up = hidden.chunk(2, dim=-1)
        out = torch.einsum("tkhi,tki->tkh", down[experts], F.silu(gate) * up)
        return (out * weights[..., None].to(x.dtype)).sum(1)
    result = torch.zeros_like(x)
    for e in experts.unique().tolist():
        row, choice = (experts == e).nonzero(as_tuple=True)
        gate, up = F.linear(x[row], gate_up[e]).chunk(2, dim=-1)
        out = F.linear(F.silu(gate) * up, down[e]) * weights[row, choice, None].to(x.dtype)
        result.index_add_(0, row, out)
    return result
