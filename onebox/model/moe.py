"""Mixture of experts with a shared expert. Rows in, rows out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onebox.kernels.moe_ref import experts_ref, route_ref
from onebox.kernels.weights import Weight, dequantize, pick
from onebox.model.layers import MlpWeights, linear, mlp, on_gpu
from onebox.spec import Spec

UNPACKED_EXPERTS = 32  # at once


@dataclass(frozen=True)
class MoeWeights:
    """Router, experts (gate rows before up rows) and the shared expert with its scalar gate."""

    router: Tensor  # [E, H]
    gate_up: Weight  # [E, 2I, H]
    down: Weight  # [E, H, I]
    shared: MlpWeights
    shared_gate: Tensor  # [1, H]


def moe(x: Tensor, w: MoeWeights, spec: Spec) -> Tensor:
    """x [T, H] -> [T, H]."""
    weights, experts = route_ref(linear(x, w.router), spec.top_k)
    if on_gpu(x) and (routed_on_gpu := _kernels(x, w, weights, experts)) is not None:
        routed = routed_on_gpu
    elif isinstance(w.gate_up, Tensor) and isinstance(w.down, Tensor) and w.gate_up.dtype == w.down.dtype == x.dtype:
        routed = experts_ref(x, w.gate_up, w.down, weights, experts)
    else:
        routed = _packed_experts(x, w, weights, experts)
    return routed + linear(x, w.shared_gate).sigmoid() * mlp(x, w.shared)


def _kernels(x: Tensor, w: MoeWeights, weights: Tensor, experts: Tensor) -> Tensor | None:
    """The chosen experts through the prefill kernels; None where these cannot read them."""
    from onebox.kernels.gemm import experts_matmul  # triton, which a CPU run never imports
    from onebox.kernels.linear import readable

    if not (readable(w.gate_up) and readable(w.down)):
        return None
    return experts_matmul(x, w.gate_up, w.down, weights, experts)


def _packed_experts(x: Tensor, w: MoeWeights, weights: Tensor, experts: Tensor) -> Tensor:
    """The experts that rows chose, unpacked a few at a time: a whole layer's would be gigabytes."""
    routed = torch.zeros_like(x)
    for some in experts.unique().split(UNPACKED_EXPERTS):
        gate_up, down = (dequantize(pick(each, some), x.dtype) for each in (w.gate_up, w.down))
        local = torch.full((w.router.shape[0],), -1, device=x.device)
        local[some] = torch.arange(len(some), device=x.device)
        routed += experts_ref(x, gate_up, down, weights, local[experts])
    return routed
