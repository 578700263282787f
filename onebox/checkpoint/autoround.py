"""INT4 as AutoRound, GPTQ, AWQ and compressed-tensors store it. Takes their tensors, gives Int4Weight, and back.

GPTQ (and `auto_round:auto_gptq`): `qweight` int32 [K/8, N], eight values of a column in one integer, lowest bits first;
`qzeros` int32 [K/g, N/8], each zero point stored less one; `scales` [K/g, N].
AWQ: `qweight` int32 [K, N/8] and `qzeros` [K/g, N/8], columns 0 2 4 6 1 3 5 7 from the lowest bits up.
compressed-tensors: `weight_packed` int32 [N, K/8], values stored plus eight; `weight_scale` [N, K/g].
"""

from __future__ import annotations

import torch
from torch import Tensor

from onebox.errors import CheckpointError
from onebox.kernels.int4_ref import Int4Weight

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
SYMMETRIC_QZERO = 0x77777777


def _bytes(x: Tensor) -> Tensor:  # [A, B] int32 -> [A, 4B] uint8
    return x.reshape(-1).view(torch.uint8).view(x.shape[0], -1)


def _nibbles(packed: Tensor) -> Tensor:  # [A, B] int32 -> [A, 8B] uint8, lowest bits first
    b = _bytes(packed)
    return torch.stack((b & 15, b >> 4), dim=-1).flatten(-2)


def _words(nibbles: Tensor) -> Tensor:  # [A, 8B] uint8 -> [A, B] int32
    packed = nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)
    return packed.reshape(-1).view(torch.int32).view(nibbles.shape[0], -1)


def _zero(zeros: Tensor) -> Tensor | None:  # [K/g, N] -> container's form: None when symmetric
    return None if not zeros.is_meta and bool((zeros == 8).all()) else zeros.T.contiguous()


def gptq_to_int4(
    qweight: Tensor, scales: Tensor, qzeros: Tensor | None, group: int, zero_offset: int = 1
) -> Int4Weight:
    """`zero_offset` 1: zero points are stored less one (GPTQ v1 and AutoRound); 0: as they are (v2)."""
    q = _bytes(qweight.T)  # the four bytes of an integer are consecutive columns of the container: bits stay
    zero = None if qzeros is None else _zero((_nibbles(qzeros) + zero_offset) & 15)
    return Int4Weight(q, scales.T.contiguous(), zero, group)


def int4_to_gptq(w: Int4Weight, zero_offset: int = 1) -> dict[str, Tensor]:
    """`qweight`, `qzeros`, `scales` of a matrix [N, K]; N and K are multiples of 8."""
    n, half = w.q.shape
    qweight = w.q.reshape(-1).view(torch.int32).view(n, half // 4).T.contiguous()
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


# |scale| / (largest |w| of the group / 8): 1 maps the largest weight to -8, less clips it
RATIOS = (0.72, 0.78, 0.84, 0.9, 0.95, 1.0, 1.05, 1.1, 8 / 7)


def quantize_int4(
    w: Tensor, group: int, dtype: torch.dtype = torch.float16, importance: Tensor | None = None
) -> Int4Weight:
    """Round to nearest in groups along K, symmetric: [..., N, K] -> Int4Weight.

    Each group's scale is the best of a few clipping ratios in both signs (a negative scale lets the level -8 serve
    the largest weight of either sign), then of one least-squares step, by squared error with the scale as stored.
    K is a multiple of `group`; `importance` [K] weighs the columns' errors. Raises CheckpointError when a scale passes
    the range of `dtype`.
    """
    g = w.float().reshape(*w.shape[:-1], -1, group)
    weight = torch.ones(()) if importance is None else importance.float().view(-1, group)
    largest = g.gather(-1, g.abs().argmax(-1, keepdim=True))
    unit = largest / -8.0

    def stored(scale: Tensor) -> Tensor:
        return scale.to(dtype).float()

    def levels(scale: Tensor) -> Tensor:
        return torch.where(scale == 0, 0.0, g / scale).round_().clamp_(-8, 7)

    def error(scale: Tensor, q: Tensor) -> Tensor:
        return (q * scale).sub_(g).square_().mul_(weight).sum(-1, keepdim=True)

    best = stored(unit)
    if not bool(best.isfinite().all()):
        raise CheckpointError(
            f"a weight of {float(largest.abs().max()):.3g} needs an INT4 scale past {dtype}; use a recipe "
            "that keeps this part in FP8 or 16-bit."
        )
    q = levels(best)
    least = error(best, q)

    def keep_better(scale: Tensor) -> None:
        nonlocal best, q, least
        scale = stored(scale)
        tried = levels(scale)
        e = error(scale, tried)
        better = e < least
        best, q, least = torch.where(better, scale, best), torch.where(better, tried, q), torch.where(better, e, least)

    for ratio in RATIOS:
        for sign in (1.0, -1.0):
            if (ratio, sign) != (1.0, 1.0):
                keep_better(unit * (ratio * sign))
    fit = (g * q * weight).sum(-1, keepdim=True) / (q.square() * weight).sum(-1, keepdim=True).clamp_min(1e-30)
    keep_better(fit)
    return pack_int4(q.flatten(-2), best.squeeze(-1).to(dtype), group)


def pack_int4(q: Tensor, scale: Tensor, group: int) -> Int4Weight:
    """Levels [..., N, K] in [-8, 7] and scales [..., N, K/group] as a symmetric Int4Weight."""
    nibbles = (q + 8).to(torch.uint8)
    return Int4Weight(nibbles[..., 0::2] | (nibbles[..., 1::2] << 4), scale.contiguous(), None, group)
