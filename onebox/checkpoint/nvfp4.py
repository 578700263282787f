"""NVFP4: a 16- or 32-bit matrix -> Nvfp4Weight."""

from __future__ import annotations

import torch
from torch import Tensor

from onebox.checkpoint.fp8_block import FP8_MAX
from onebox.kernels.nvfp4_ref import NVFP4_BLOCK, Nvfp4Weight

E2M1_MAX = 6.0
# a magnitude above the i-th edge takes code i + 1; nearest value, ties to the even code
_EDGES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
_EDGES[1::2] = torch.nextafter(_EDGES[1::2], torch.zeros(3))
_LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def global_scale_for(largest: Tensor) -> Tensor:
    """The scale with which the largest weight of a matrix takes the largest block scale and the largest level."""
    return torch.where(largest == 0, 1.0, largest.float() / (FP8_MAX * E2M1_MAX))


def quantize_nvfp4(w: Tensor, global_scale: Tensor | None = None) -> Nvfp4Weight:
    """[N, K] -> Nvfp4Weight. A block's scale maps its largest magnitude to 6 or, where the squared error is less, to 4.

    `global_scale` is given where several matrices share one (gate and up of an expert).
    """
    if global_scale is None:
        global_scale = global_scale_for(w.abs().amax().float())
    blocks = w.float().reshape(*w.shape[:-1], -1, NVFP4_BLOCK)
    largest = blocks.abs().amax(-1)
    codes = scale = least = torch.empty(0)
    for top in (E2M1_MAX, 4.0):
        s = (largest / top / global_scale).clamp(max=FP8_MAX).to(torch.float8_e4m3fn)
        step = (s.float() * global_scale)[..., None]
        ratio = torch.where(step == 0, 0.0, blocks / step)
        magnitude = torch.bucketize(ratio.abs(), _EDGES)
        value = torch.copysign(_LEVELS[magnitude], ratio) * step
        tried = (magnitude | (torch.signbit(ratio).long() << 3)).to(torch.uint8)
        e = (value - blocks).square().sum(-1)
        if top == E2M1_MAX:
            codes, scale, least = tried, s, e
        else:
            better = e < least
            codes = torch.where(better[..., None], tried, codes)
            scale = torch.where(better, s.float(), scale.float()).to(torch.float8_e4m3fn)
    q = codes.flatten(-2)
    return Nvfp4Weight(q[..., 0::2] | (q[..., 1::2] << 4), scale, global_scale)
