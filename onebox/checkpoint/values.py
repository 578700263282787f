"""What the numbers of a stored weight may be: finite, with scales that mean something. Costs one read of memory."""

from __future__ import annotations

import torch
from torch import Tensor

from onebox.errors import CheckpointError
from onebox.kernels.int4_ref import Int4Weight
from onebox.kernels.int8_ref import Int8Weight
from onebox.kernels.nvfp4_ref import Nvfp4Weight
from onebox.kernels.weights import Packed, Weight, tensors

LARGEST_SCALE = 1e4  # weights are around 0.01 to 1
WAY_OUT = "fetch the checkpoint again, or rebuild it with 'onebox build'"


def is_finite(t: Tensor) -> bool:
    """No NaN, no Inf. The extremes say so: NaN passes through them, and they are read at memory speed."""
    if t.numel() == 0 or not t.is_floating_point():
        return True
    if t.dtype == torch.float8_e4m3fn:  # no Inf; NaN is 0x7f and 0xff
        return int(t.view(torch.int8).max()) != 0x7F and int(t.view(torch.uint8).max()) != 0xFF
    low, high = (t.float() if t.element_size() == 1 else t).aminmax()
    return bool(low.isfinite() & high.isfinite())


def check_values(name: str, w: Weight) -> None:
    """Raises CheckpointError naming the tensor `name` and the finding."""

    def require(ok: bool, finding: str) -> None:
        if not ok:
            raise CheckpointError(f"{name}: {finding}; {WAY_OUT}.")

    for field, t in tensors(w).items():
        what = "" if field in ("weight", "q") else f"its {field.replace('_', ' ')} "
        require(is_finite(t), f"{what}holds NaN or Inf")
    if isinstance(w, Tensor) or w.q.numel() == 0:
        return
    if not isinstance(w, Int4Weight):  # whose scales may be negative
        require(float(w.scale.float().min()) >= 0, "a scale is negative")
    largest = w.global_scale if isinstance(w, Nvfp4Weight) else w.scale
    require(float(largest.float().abs().max()) < LARGEST_SCALE, f"a scale is past {LARGEST_SCALE:,.0f}")
    if isinstance(w, Nvfp4Weight):
        require(bool((w.global_scale > 0).all()), "the global scale is not positive")
    require(not _lost_scales(w), "has values under a scale of zero")


def _lost_scales(w: Packed) -> bool:
    """Whether a scale is zero where the levels are not. An NVFP4 block may be so small; a whole matrix may not."""
    lost = w.scale == 0
    if not bool(lost.any()):
        return False
    if isinstance(w, Nvfp4Weight):
        return bool(lost.all()) and bool(((w.q & 0x77) != 0).any())
    if isinstance(w, Int4Weight):
        low, high = (q.unflatten(-1, (-1, w.group // 2))[lost] for q in (w.q & 15, w.q >> 4))
        zero = torch.tensor(8, dtype=torch.uint8) if w.zero is None else w.zero[lost][:, None]
        return bool(((low != zero) | (high != zero)).any())
    if isinstance(w, Int8Weight):
        return bool((w.q[lost] != 0).any())
    n, k = w.q.shape[-2:]
    wide = lost.repeat_interleave(w.block[0], -2)[..., :n, :].repeat_interleave(w.block[1], -1)[..., :k]
    return bool((w.q.view(torch.uint8)[wide] & 0x7F != 0).any())
