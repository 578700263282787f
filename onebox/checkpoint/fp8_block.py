"""FP8 in blocks: a 16- or 32-bit matrix -> Fp8Weight."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from onebox.kernels.fp8_ref import Fp8Weight

FP8_MAX = 448.0


def quantize_fp8(w: Tensor, block: tuple[int, int] = (128, 128)) -> Fp8Weight:
    """A block's largest magnitude becomes 448, the largest value there is: [N, K] -> Fp8Weight. Edges may be ragged."""
    n, k = w.shape
    bn, bk = block
    padded = pad(w.float(), (0, -k % bk, 0, -n % bn))
    tiles = padded.view(-(-n // bn), bn, -(-k // bk), bk)
    scale = tiles.abs().amax(dim=(1, 3)) / FP8_MAX
    divisor = torch.where(scale == 0, 1.0, scale)
    q = (tiles / divisor[:, None, :, None]).clamp_(-FP8_MAX, FP8_MAX).view(padded.shape)[:n, :k]
    return Fp8Weight(q.to(torch.float8_e4m3fn), scale, block)
