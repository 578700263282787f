"""Decode projections, as plain mathematics: the residual stream between kernels, projections of it, sums into it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onebox.kernels.weights import Weight, dequantize


@dataclass(frozen=True)
class Residual:
    """Rows of the residual stream on their way from one kernel to the next, with the next norm half done.

    `scaled` = x * (1 + norm weight); `squares` sums to the sum of x^2 over a row. A reader divides by the rms at its
    end.
    `digits` and `steps` are `scaled` as whole numbers, which INT4's kernels read: step * (256 high + low), a step for
    128
    columns of a row, those columns as the even ones, then the odd ones. They mean nothing where 128 does not divide H.
    """

    x: Tensor  # [T, H]
    scaled: Tensor  # [T, H]
    squares: Tensor  # [parts, T] fp32
    digits: Tensor  # [T, 2, H] int8, high then low
    steps: Tensor  # [H / 128, T] fp32


def residual_ref(x: Tensor, norm: Tensor) -> Residual:
    """x [T, H] as a Residual ahead of a norm with weight [H]."""
    y = x.float()
    scaled, squares = y * (1.0 + norm.float()), y.square().sum(-1)[None]
    if x.shape[-1] % 128:
        return Residual(x, scaled.to(x.dtype), squares, x, squares)
    return Residual(x, scaled.to(x.dtype), squares, *digits_ref(scaled))


def digits_ref(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, H] as `Residual.digits` and `Residual.steps`."""
    groups = x.float().unflatten(-1, (-1, 128))
    steps = groups.abs().amax(-1) / 32512
    steps = torch.where(steps > 0, steps, 1.0)
    whole = torch.floor(groups / steps[..., None] + 0.5).flatten(1).to(torch.int32)
    high = (whole + 128) >> 8
    digits = torch.stack((pair_columns(high), pair_columns(whole - high * 256)), dim=1).to(torch.int8)
    return digits, steps.T.contiguous()


def pair_columns(x: Tensor) -> Tensor:
    """Every 128 columns of the last dimension as the even ones, then the odd ones."""
    paired: Tensor = x.unflatten(-1, (-1, 64, 2)).transpose(-1, -2).flatten(-3)
    return paired


def normalized_ref(h: Residual, eps: float) -> Tensor:
    """The norm's result, [T, H] fp32."""
    mean = h.squares.sum(0) / h.x.shape[-1]
    return h.scaled.float() * torch.rsqrt(mean + eps)[:, None]


def normalize_ref(h: Residual, eps: float) -> Tensor:
    return normalized_ref(h, eps).to(h.x.dtype)


def embed_ref(tokens: Tensor, embedding: Tensor, norm: Tensor) -> Residual:
    return residual_ref(embedding[tokens], norm)


def project_ref(h: Residual, w: Weight, tail: Weight | None, eps: float) -> Tensor:
    """norm(h) times the rows of `w`, then of `tail`: [T, N + N']."""
    y = normalized_ref(h, eps)
    parts = [y @ dequantize(each).T for each in (w, tail) if each is not None]
    return torch.cat(parts, dim=-1).to(h.x.dtype)


def project_add_ref(
    y: Tensor,
    w: Weight,
    h: Residual,
    norm: Tensor,
    squares: Tensor | None = None,
    eps: float = 0.0,
    paired: bool = False,
) -> Residual:
    """h + y w^T, ahead of a norm with weight `norm`. y [T, K], w [H, K].

    With `squares` [blocks, parts, T], every block of K / blocks columns of y is first divided by its rms.
    """
    y = y.float()
    if paired:
        y = y.unflatten(-1, (-1, 2, 64)).transpose(-1, -2).flatten(-3)
    if squares is not None:
        width = y.shape[1] // squares.shape[0]
        rms = torch.rsqrt(squares.sum(1).T / width + eps)
        y = y * rms.repeat_interleave(width, dim=1)
    return residual_ref((h.x.float() + y @ dequantize(w).T).to(h.x.dtype), norm)
