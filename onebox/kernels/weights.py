"""A matrix in any weight format: what is common to the containers. Takes weights, gives weights or plain tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from onebox.kernels.fp8_ref import Fp8Weight, fp8_dequantize_ref
from onebox.kernels.int4_ref import Int4Weight, int4_dequantize_ref
from onebox.kernels.int8_ref import Int8Weight, int8_dequantize_ref
from onebox.kernels.nvfp4_ref import Nvfp4Weight, nvfp4_dequantize_ref

Packed: TypeAlias = Int4Weight | Fp8Weight | Int8Weight | Nvfp4Weight
Weight: TypeAlias = Tensor | Packed


def dequantize(w: Weight, dtype: torch.dtype = torch.float32) -> Tensor:
    """The matrix itself, [..., N, K]."""
    if isinstance(w, Tensor):
        return w.to(dtype)
    if isinstance(w, Int4Weight):
        return int4_dequantize_ref(w, dtype)
    if isinstance(w, Fp8Weight):
        return fp8_dequantize_ref(w, dtype)
    return int8_dequantize_ref(w, dtype) if isinstance(w, Int8Weight) else nvfp4_dequantize_ref(w, dtype)


def tensors(w: Weight) -> dict[str, Tensor]:
    """The tensors a weight is made of, by field name."""
    if isinstance(w, Tensor):
        return {"weight": w}
    values = {f.name: getattr(w, f.name) for f in fields(w)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def nbytes(w: Weight) -> int:
    """Bytes in memory, scales included."""
    return sum(t.numel() * t.element_size() for t in tensors(w).values())


def format_name(w: Weight) -> str:
    """The ledger's word for the format: bf16 (any 16-bit), fp32, int4, fp8, int8, nvfp4."""
    if isinstance(w, Tensor):
        return "fp32" if w.element_size() == 4 else "bf16"
    return {Int4Weight: "int4", Fp8Weight: "fp8", Int8Weight: "int8", Nvfp4Weight: "nvfp4"}[type(w)]


def with_tensors(w: Packed, values: Mapping[str, Tensor]) -> Packed:
    """The same container over other tensors."""
    changed: dict[str, Any] = dict(values)
    return replace(w, **changed)


def to(w: Weight, device: torch.device | str) -> Weight:
    if isinstance(w, Tensor):
        return w.to(device)
    return with_tensors(w, {name: t.to(device) for name, t in tensors(w).items()})


def same_format(a: Weight, b: Weight) -> bool:
    """Whether the two can stand in one container: the same format, group, block and kind of zero point."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype
    if type(a) is not type(b) or {n: t.dtype for n, t in tensors(a).items()} != {
        n: t.dtype for n, t in tensors(b).items()
    }:
        return False
    if isinstance(a, Int4Weight) and isinstance(b, Int4Weight):
        return a.group == b.group
    return not isinstance(a, Fp8Weight) or not isinstance(b, Fp8Weight) or a.block == b.block


def cat(parts: Sequence[Weight]) -> Weight:
    """Matrices of one format and K, stacked along N.

    FP8 parts that do not end on a block edge give smaller blocks; NVFP4 parts of different global scale give one global
    scale a row.
    """
    first, rest = parts[0], parts[1:]
    assert all(same_format(first, each) for each in rest), "parts of different formats"
    if not rest:
        return first
    if isinstance(first, Tensor):
        return torch.cat([p for p in parts if isinstance(p, Tensor)], dim=-2)
    if isinstance(first, Fp8Weight):
        return _cat_fp8([p for p in parts if isinstance(p, Fp8Weight)])
    if isinstance(first, Nvfp4Weight):
        return _cat_nvfp4([p for p in parts if isinstance(p, Nvfp4Weight)])
    dims = {"q": -2, "scale": -1 if isinstance(first, Int8Weight) else -2, "zero": -2}
    values = [tensors(p) for p in parts]
    return with_tensors(first, {name: torch.cat([v[name] for v in values], dim=dims[name]) for name in values[0]})


def _cat_fp8(parts: Sequence[Fp8Weight]) -> Fp8Weight:
    block_n, block_k = parts[0].block
    fine = math.gcd(block_n, *(p.q.shape[-2] for p in parts[:-1]))
    scales = [p.scale.repeat_interleave(block_n // fine, dim=-2)[..., : -(-p.q.shape[-2] // fine), :] for p in parts]
    return Fp8Weight(torch.cat([p.q for p in parts], dim=-2), torch.cat(scales, dim=-2), (fine, block_k))


def _cat_nvfp4(parts: Sequence[Nvfp4Weight]) -> Nvfp4Weight:
    first = parts[0]
    globals_ = [p.global_scale for p in parts]
    if not all(g.shape == globals_[0].shape and (g.is_meta or torch.equal(g, globals_[0])) for g in globals_):
        globals_ = [row_scale(p) for p in parts]
        combined = torch.cat(globals_, dim=-1)
    else:
        combined = first.global_scale
    return Nvfp4Weight(torch.cat([p.q for p in parts], dim=-2), torch.cat([p.scale for p in parts], dim=-2), combined)


def row_scale(w: Nvfp4Weight) -> Tensor:
    """The global scale as one entry a row, [..., N]."""
    g = w.global_scale
    return g if g.ndim == w.q.ndim - 1 else g.unsqueeze(-1).expand(w.q.shape[:-1])


def stack(parts: Sequence[Weight]) -> Weight:
    """Matrices of one format and shape under a new leading dimension, [E, ..., N, K]."""
    first = parts[0]
    assert all(same_format(first, each) for each in parts[1:]), "parts of different formats"
    if isinstance(first, Tensor):
        return torch.stack([p for p in parts if isinstance(p, Tensor)])
    if isinstance(first, Nvfp4Weight) and len({p.global_scale.ndim for p in parts if isinstance(p, Nvfp4Weight)}) > 1:
        parts = [replace(p, global_scale=row_scale(p)) for p in parts if isinstance(p, Nvfp4Weight)]
    values = [tensors(p) for p in parts]
    return with_tensors(first, {name: torch.stack([v[name] for v in values]) for name in values[0]})


def pick(w: Weight, which: Tensor) -> Weight:
    """Some matrices of a stacked weight."""
    if isinstance(w, Tensor):
        return w[which]
    return with_tensors(w, {name: t[which] for name, t in tensors(w).items()})


def rows(w: Weight, part: slice) -> Weight:
    """Rows [start, stop) of each matrix. An FP8 slice starts on a block edge."""
    n = (w if isinstance(w, Tensor) else w.q).shape[-2]
    start, stop, step = part.indices(n)
    assert step == 1, "rows are contiguous"
    part = slice(start, stop)
    if isinstance(w, Tensor):
        return w[..., part, :]
    if isinstance(w, Fp8Weight):
        block_n = w.block[0]
        assert start % block_n == 0, f"row {start} is inside a block of {block_n}"
        return replace(w, q=w.q[..., part, :], scale=w.scale[..., start // block_n : -(-stop // block_n), :])
    if isinstance(w, Int8Weight):
        return replace(w, q=w.q[..., part, :], scale=w.scale[..., part])
    if isinstance(w, Nvfp4Weight):
        per_row = w.global_scale.ndim == w.q.ndim - 1
        return Nvfp4Weight(
            w.q[..., part, :], w.scale[..., part, :], w.global_scale[..., part] if per_row else w.global_scale
        )
    zero = None if w.zero is None else w.zero[..., part, :]
    return replace(w, q=w.q[..., part, :], scale=w.scale[..., part, :], zero=zero)
