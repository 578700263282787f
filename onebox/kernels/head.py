"""LM head for up to 64 rows: one read of the weight, fp32 logits, the greedy token found on the way."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onebox.kernels import configs
from onebox.kernels.linear import Operand, Workspace, inline_asm, launch, row_tile
from onebox.kernels.tile import last_of, launch_next, prefetch_rows, times_rows, wait_previous
from onebox.kernels.weights import Weight


@triton.jit
def _head_kernel(
    x_ptr, q_ptr, s_ptr, g_ptr, logits_ptr, best_ptr, partial_ptr, counter_ptr, n_rows, V,
    H: tl.constexpr, T: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr, ASM: tl.constexpr,
    STAGES: tl.constexpr, UNROLL: tl.constexpr, LOGITS: tl.constexpr, TILES: tl.constexpr, PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    tile = tl.program_id(0)
    n = tile * BN + tl.arange(0, BN)
    rows = tl.minimum(n, V - 1)
    prefetch_rows(q_ptr, rows, H, FORMAT, PREFETCH)
    wait_previous(PDL)
    xt = tl.arange(0, T)
    x_mask = xt < n_rows
    acc = times_rows(
        q_ptr, s_ptr, g_ptr, rows, x_ptr, xt, x_mask, n_rows, 0, x_ptr, 0.0,
        H, H, T, BN, BK, FORMAT, ASM, STAGES, UNROLL, False, 0,
    )  # fmt: skip
    if LOGITS:
        # int64: row * vocabulary passes 2**31 at 8649 rows; rows are few, tiles are not
        tl.store(logits_ptr + xt[None, :] * V + n[:, None], acc, mask=(n < V)[:, None] & x_mask[None, :])
    acc = tl.where((n < V)[:, None], acc, float("-inf"))
    top, index = tl.max(acc, axis=0, return_indices=True)
    tiles = tl.num_programs(0)
    tl.store(partial_ptr + xt * tiles + tile, top, mask=x_mask)
    ids_ptr = partial_ptr.to(tl.pointer_type(tl.int32)) + n_rows * tiles
    tl.store(ids_ptr + xt * tiles + tile, tile * BN + index, mask=x_mask)
    if last_of(counter_ptr, tiles):
        i = tl.arange(0, TILES)
        for t in range(n_rows):
            tops = tl.load(partial_ptr + t * tiles + i, mask=i < tiles, other=float("-inf"), cache_modifier=".cg")
            ids = tl.load(ids_ptr + t * tiles + i, mask=i < tiles, other=2147483647, cache_modifier=".cg")
            best = tl.min(tl.where(tops == tl.max(tops, axis=0), ids, 2147483647), axis=0)
            tl.store(best_ptr + t, best.to(tl.int64))


def head(hidden: Tensor, w: Weight, workspace: Workspace, with_logits: bool = True) -> tuple[Tensor, Tensor | None]:
    """hidden [T, H], w [V, H] -> (best token [T] int64, lowest id on ties; logits [T, V] fp32 or None).

    The first rows of `w` alone make a head over a prefix of the vocabulary.
    """
    rows, width = hidden.shape
    a, c, device = Operand.of(w), configs.config("head", hidden.device, width), hidden.device
    best = torch.empty(rows, dtype=torch.int64, device=device)
    logits = torch.empty(rows, a.n, dtype=torch.float32, device=device) if with_logits else None
    tiles = triton.cdiv(a.n, c.block_n)
    _head_kernel[(tiles,)](
        hidden, a.q, a.scale, a.extra, hidden if logits is None else logits, best, workspace.partial,
        workspace.counters, rows, a.n, H=width, T=row_tile(rows), BN=c.block_n, BK=a.step, FORMAT=a.format,
        ASM=inline_asm(hidden), STAGES=c.stages, UNROLL=c.unroll, LOGITS=with_logits,
        TILES=triton.next_power_of_2(tiles),
        PREFETCH=c.prefetch, **launch(device, c.warps),
    )  # fmt: skip
    return best, logits
