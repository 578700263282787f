"""Calibrated INT4: rounding errors are fed forward into the columns still to be rounded, as GPTQ does.

Frantar et al., "GPTQ", arXiv 2210.17323. Columns are taken by falling diagonal of the Hessian, but groups and scales
stay where they are ("static groups"), so the result is an ordinary Int4Weight without g_idx.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from onebox.checkpoint.autoround import pack_int4, quantize_int4
from onebox.checkpoint.scheme import Scheme
from onebox.checkpoint.write import Quantizer
from onebox.errors import CheckpointError
from onebox.kernels.int4_ref import Int4Weight
from onebox.kernels.weights import Packed

BLOCK = 128
DAMPING = 0.01  # of the mean diagonal


def inverse_factor(hessian: Tensor) -> Tensor:
    """Upper Cholesky factor of the inverse of the damped Hessian, [K, K] fp32."""
    h = hessian.double()
    diagonal = h.diagonal()
    damped = h + torch.eye(h.shape[0], dtype=h.dtype, device=h.device) * (DAMPING * float(diagonal.mean()) + 1e-12)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor.float()


def quantize_gptq(w: Tensor, hessian: Tensor, group: int, dtype: torch.dtype = torch.float16) -> Int4Weight:
    """w [N, K] with inputs x of which `hessian` is the mean of x x^T, [K, K] -> Int4Weight.

    Least error of w x, not of w. Raises CheckpointError when a scale passes the range of `dtype`.
    """
    diagonal = hessian.diagonal().float()
    scale = quantize_int4(w, group, dtype, importance=diagonal + 1e-6 * diagonal.mean()).scale
    order = diagonal.argsort(descending=True, stable=True)
    try:
        factor = inverse_factor(hessian[order][:, order])
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        raise CheckpointError(
            "the calibration text gives inputs that no error can be weighed with; use other text, or none."
        ) from None
    left = w.float()[:, order]
    step = scale.float().repeat_interleave(group, dim=1)[:, order]
    levels = torch.empty_like(left)
    k = left.shape[1]
    for start in range(0, k, BLOCK):
        end = min(start + BLOCK, k)
        block, f = left[:, start:end].clone(), factor[start:end, start:end]
        errors = torch.empty_like(block)
        for i in range(end - start):
            column, s = block[:, i], step[:, start + i]
            q = torch.where(s == 0, 0.0, column / s).round().clamp(-8, 7)
            levels[:, start + i] = q
            errors[:, i] = (column - q * s) / f[i, i]
            block[:, i + 1 :] -= errors[:, i, None] * f[i, None, i + 1 :]
        left[:, end:] -= errors @ factor[start:end, end:]
    return pack_int4(levels[:, order.argsort()], scale, group)


def gptq_quantizer(hessian: Callable[[str], Tensor | None]) -> Quantizer:
    """A Quantizer for `build`: GPTQ for INT4 modules with a Hessian, None (round to nearest) for any other."""

    def quantize(name: str, first: int, w: Tensor, scheme: Scheme) -> Packed | None:
        h = hessian(name) if scheme.kind == "int4" else None
        return None if h is None else quantize_gptq(w, h, scheme.group)

    return quantize
