"""Routing and experts, as plain mathematics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def route_ref(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Softmax, best `top_k`, renormalised. logits [T, E] -> (weights [T, top_k] fp32, experts [T, top_k] int64)."""
    weights, experts = logits.float().softmax(-1).topk(top_k, dim=-1)
    return weights / weights.sum(-1, keepdim=True), experts


def experts_ref(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """Weighted sum of the chosen experts' SwiGLU. x [T, H], gate_up [E, 2I, H], down [E, H, I] -> [T, H].

    Choices below 0 are left out.
    """
    if experts.numel() <= 8 and bool(
        (experts >= 0).all()
    ):  # few rows: one batched product a matrix beats a loop over experts
        hidden = torch.einsum("tkih,th->tki", gate_up[experts], x)
        gate, up = hidden.chunk(2, dim=-1)
        out = torch.einsum("tkhi,tki->tkh", down[experts], F.silu(gate) * up)
        return (out * weights[..., None].to(x.dtype)).sum(1)
    result = torch.zeros_like(x)
    for e in experts[experts >= 0].unique().tolist():
        row, choice = (experts == e).nonzero(as_tuple=True)
        gate, up = F.linear(x[row], gate_up[e]).chunk(2, dim=-1)
        out = F.linear(F.silu(gate) * up, down[e]) * weights[row, choice, None].to(x.dtype)
        result.index_add_(0, row, out)
    return result


@dataclass(frozen=True)
class Routing:
    """Which experts the rows meet. Slot 0 is the shared expert; slots [1, count) are the experts met, by rising id.

    A row that did not choose a slot's expert has weight 0 there. Entries from `count` on mean nothing.
    """

    weight: Tensor  # [slots, T] fp32
    expert: Tensor  # [slots] int32; slot 0's means nothing
    count: Tensor  # [1] int32


@dataclass(frozen=True)
class Chosen:
    """Every row's own experts, best first: what kernels read that work on one row of one expert at a time."""

    gate: Tensor  # [T] fp32: the shared expert's weight
    weight: Tensor  # [T, k] fp32
    expert: Tensor  # [T, k] int32

    @property
    def count(self) -> Tensor:
        """Distinct experts plus one, as in `Routing`. Waits for the device."""
        return torch.tensor([1 + self.expert.unique().numel()], dtype=torch.int32, device=self.expert.device)


def chosen_ref(normed: Tensor, router: Tensor, shared_gate: Tensor, top_k: int) -> Chosen:
    """normed [T, H] fp32, router [E, H], shared_gate [1, H]."""
    weights, experts = route_ref(normed @ router.float().T, top_k)
    return Chosen(torch.sigmoid(normed @ shared_gate.float().T)[:, 0], weights, experts.to(torch.int32))


def route_slots_ref(normed: Tensor, router: Tensor, shared_gate: Tensor, top_k: int) -> Routing:
    """normed [T, H] fp32, router [E, H], shared_gate [1, H]."""
    weights, experts = route_ref(normed @ router.float().T, top_k)
    met = experts.unique()
    slots = torch.zeros(1 + met.numel(), normed.shape[0], device=normed.device)
    slots[0] = torch.sigmoid(normed @ shared_gate.float().T)[:, 0]
    for slot, e in enumerate(met.tolist(), start=1):
        slots[slot] = torch.where(experts == e, weights, 0.0).sum(-1)
    ids = torch.cat((met.new_zeros(1), met)).to(torch.int32)
    return Routing(slots, ids, torch.tensor([1 + met.numel()], dtype=torch.int32, device=normed.device))


def slots_ref(normed: Tensor, routing: Routing, gate_up: Tensor, down: Tensor, shared: tuple[Tensor, Tensor]) -> Tensor:
    """The weighted sum over slots, [T, H] fp32. gate_up [E, 2I, H], down [E, H, I], shared the same for slot 0."""
    total = torch.zeros_like(normed)
    for slot in range(int(routing.count)):
        e = int(routing.expert[slot])
        up_w, down_w = (gate_up[e], down[e]) if slot else shared
        gate, up = (normed @ up_w.float().T).chunk(2, dim=-1)
        total += (F.silu(gate) * up * routing.weight[slot, :, None]) @ down_w.float().T
    return total
