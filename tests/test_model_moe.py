"""Experts on the reference path: packed ones, unpacked a few at a time, against all of them dense."""

from __future__ import annotations

import pytest
import torch

from onebox.kernels.int8_ref import Int8Weight
from onebox.kernels.moe_ref import experts_ref, route_ref
from onebox.kernels.weights import dequantize
from onebox.model import moe
from onebox.model.layers import MlpWeights


@pytest.mark.parametrize("n_rows", [1, 3, 40])
def test_experts_unpacked_a_few_at_a_time_equal_all_of_them_dense(n_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(n_rows)

    def packed(*shape: int) -> Int8Weight:
        q = torch.randint(-127, 128, shape, generator=g).to(torch.int8)
        return Int8Weight(q, torch.rand(shape[:-1], generator=g) / 500)

    none = torch.zeros(0, 32)
    w = moe.MoeWeights(torch.zeros(10, 32), packed(10, 48, 32), packed(10, 32, 24), MlpWeights(none, none, none), none)
    x = torch.randn(n_rows, 32, generator=g)
    weights, experts = route_ref(torch.randn(n_rows, 10, generator=g), 4)
    want = experts_ref(x, dequantize(w.gate_up), dequantize(w.down), weights, experts)
    monkeypatch.setattr(moe, "UNPACKED_EXPERTS", 3)
    assert (moe._packed_experts(x, w, weights, experts) - want).abs().max() <= 1e-5 * want.abs().max()
