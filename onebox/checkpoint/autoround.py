"""INT4 as AutoRound, GPTQ, AWQ and compressed-tensors store it. Takes their tensors, gives Int4Weight, and back.

GPTQ (and `auto_round:auto_gptq`): `qweight` int32 [K/8, N], eight values of a column in one integer, lowest bits first;
`qzeros` int32 [K/g, N/8], each zero point stored less one; `scales` [K/g, N].
AWQ: `qweight` int32 [K, N/8] and `qzeros` [K/g, N/8], columns 0 2 4 6 1 3 5 7 from the lowest bits up.
compressed-tensors: `weight_packed` int32 [N, K/8], values stored plus eight; `weight_scale` [N, K/g].
"""

from __future__ import annotations

import torch
from torch import Tensor

from onebox.kernels.int4_ref import Int4Weight

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
SYMMETRIC_QZERO = 0x77777777


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _nibbles(packed: Tensor) -> Tensor:  # [A, B] int32 -> [A, 8B] uint8, lowest bits first
    b = _bytes(packed)
    return torch.stack((b & 15, b >> 4), dim=-1).flatten(-2)


def _words(nibbles: Tensor) -> Tensor:  # [A, 8B] uint8 -> [A, B] int32
    return (nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)).contiguous().view(torch.int32)


def _zero(zeros: Tensor) -> Tensor | None:  # [K/g, N] -> container's form: None when symmetric
    return None if bool((zeros == 8).all()) else zeros.T.contiguous()


def gptq_to_int4(
    qweight: Tensor, scales: Tensor, qzeros: Tensor | None, group: int, zero_offset: int = 1
) -> Int4Weight:
    """`zero_offset` 1: zero points are stored less one (GPTQ v1 and AutoRound); 0: as they are (v2)."""
    words, n = qweight.shape
    # the four bytes of an integer are consecutive columns of the container: bytes move, bits stay
    q = _bytes(qweight).view(words, n, 4).transpose(0, 1).reshape(n, words * 4)
    zero = None if qzeros is None else _zero((_nibbles(qzeros) + zero_offset) & 15)
    return Int4Weight(q, scales.T.contiguous(), zero, group)


def int4_to_gptq(w: Int4Weight, zero_offset: int = 1) -> dict[str, Tensor]:
    """`qweight`, `qzeros`, `scales` of a matrix [N, K]; N and K are multiples of 8."""
    n, half = w.q.shape
    qweight = w.q.view(n, half // 4, 4).transpose(0, 1).contiguous().view(torch.int32).squeeze(-1)
    groups = w.scale.shape[1]
    zeros = torch.full((groups, n), 8, dtype=torch.uint8) if w.zero is None else w.zero.T.contiguous()
    return {
        "qweight": qweight,
        "qzeros": _words((zeros - zero_offset) & 15),
        "scales": w.scale.T.contiguous(),
    }


def awq_to_int4(qweight: Tensor, scales: Tensor, qzeros: Tensor | None, group: int) -> Int4Weight:
    order = torch.tensor(AWQ_ORDER).argsort()

    def columns(packed: Tensor) -> Tensor:
        n = _nibbles(packed)
        return n.view(n.shape[0], -1, 8)[..., order].flatten(-2)

    values = columns(qweight).T  # [N, K]
    zero = None if qzeros is None else _zero(columns(qzeros))
    return Int4Weight((values[:, 0::2] | (values[:, 1::2] << 4)).contiguous(), scales.T.contiguous(), zero, group)


def packed_to_int4(weight_packed: Tensor, weight_scale: Tensor, zero_point: Tensor | None, group: int) -> Int4Weight:
    """compressed-tensors' `pack-quantized`; `zero_point` int32 [N/8, K/g], packed along N."""
    zero = None if zero_point is None else _zero(_nibbles(zero_point.T).contiguous())
    return Int4Weight(_bytes(weight_packed), weight_scale.contiguous(), zero, group)
