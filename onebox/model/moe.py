"""Mixture of experts with a shared expert. Rows in, rows out."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from onebox.kernels.moe_ref import experts_ref, route_ref
from onebox.kernels.weights import Weight
from onebox.model.layers import MlpWeights, dense, linear, mlp
from onebox.spec import Spec


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
    routed = experts_ref(x, dense(w.gate_up, x.dtype), dense(w.down, x.dtype), weights, experts)
    return routed + linear(x, w.shared_gate).sigmoid() * mlp(x, w.shared)
