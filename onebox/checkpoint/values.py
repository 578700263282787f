"""What the numbers of a stored weight may be: finite, with scales that mean something. Costs one read of memory."""

from __future__ import annotations

import torch
from torch import Tensor

from onebox.errors import CheckpointError
from onebox.kernels.fp8_ref import Fp8Weight
from onebox.kernels.int4_ref import Int4Weight
from onebox.kernels.int8_ref import Int8Weight
from onebox.kernels.nvfp4_ref import Nvfp4Weight
from onebox.kernels.weights import Weight, tensors

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
    if isinstance(w, Int4Weight):
        require(not _levels_of_zero(w), "a group has values but a scale of zero")
        require(w.scale.numel() == 0 or float(w.scale.abs().max()) < 1e4, "a scale is past 10,000")
    elif isinstance(w, Fp8Weight | Nvfp4Weight | Int8Weight):
        require(w.scale.numel() == 0 or float(w.scale.float().min()) >= 0, "a scale is negative")
        if isinstance(w, Nvfp4Weight):
            require(bool((w.global_scale > 0).all()), "the global scale is not positive")


def _levels_of_zero(w: Int4Weight) -> bool:
    """Whether a symmetric group with a scale of zero has a level that is not zero: its scale was lost."""
    if w.zero is not None:
        return False
    lost = w.scale == 0
    if not bool(lost.any()):
        return False
    levels = w.q.unflatten(-1, (-1, w.group // 2))
    return bool((levels[lost] != 0x88).any())
