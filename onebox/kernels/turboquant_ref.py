"""Keys and values in few bits: what the bytes of a page mean, and both directions as plain mathematics.

TurboQuant (Zandieh et al., arXiv 2504.19874) without its QJL part: a vector is turned by a fixed random rotation, after
which every coordinate of a unit vector has one known density; each is coded by the Lloyd-Max quantiser of that density,
and a 16-bit scale a vector says how long it was. FP8 vectors are not turned; they have a scale of their own too. A
scale belongs to one token and one head: an entry depends on nothing that is written before, beside or after it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

VERSION = 1  # of rotations and codebooks; seeds the signs
E4M3_MAX = 448.0
FP16_MAX = 65504.0
LEVELS = 16  # the most of a codebook
OUTLIERS = 4  # mixed formats code one channel in so many with one bit more
PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,)}  # bits of a code, low ones first, by the plane that holds them
# (bits of an outlier channel, bits of another) for keys, for values; 8 bits are e4m3
FORMATS = {
    "fp8": ((8, 8), (8, 8)),
    "k8v4": ((8, 8), (4, 4)),
    "tq4": ((4, 4), (4, 4)),
    "tq3.5": ((4, 3), (4, 3)),
    "tq3": ((3, 3), (3, 3)),
    "tq2.5": ((3, 2), (3, 2)),
}


@dataclass(frozen=True)
class Group:
    """`width` coordinates in `bits` each with one fp16 scale: x = scale * level[code], or scale * e4m3 for 8 bits.

    A plane of p bits is `width * p / 8` bytes: coordinate c stands in byte c % n of its n, at bit p * (c // n).
    """

    width: int
    bits: int

    @property
    def n_bytes(self) -> int:
        return self.width * self.bits // 8


@dataclass(frozen=True)
class PageFormat:
    """What a page's bytes mean, in this order: key codes, value codes [page_size, Hkv, bytes], then the fp16 scales of
    keys and of values [page_size, Hkv, groups]. A vector's groups stand one after another, a group's planes too."""

    name: str
    n_kv_heads: int
    head_dim: int
    page_size: int
    k: tuple[Group, ...]
    v: tuple[Group, ...]

    @classmethod
    def of(cls, name: str, n_kv_heads: int, head_dim: int, page_size: int) -> PageFormat:
        """Raises ValueError for a name that is not in FORMATS and for a head that does not divide into bytes."""
        if name not in FORMATS:
            raise ValueError(f"KV format {name!r} is not known. Known: {', '.join(FORMATS)}.")
        if head_dim % 32:
            raise ValueError(f"KV format {name}: heads of {head_dim} dimensions; a multiple of 32 is needed.")

        def groups(outlier: int, other: int) -> tuple[Group, ...]:
            n = head_dim // OUTLIERS
            return (Group(head_dim, other),) if outlier == other else (Group(n, outlier), Group(head_dim - n, other))

        k, v = (groups(*bits) for bits in FORMATS[name])
        return cls(name, n_kv_heads, head_dim, page_size, k, v)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values over all heads of a layer, scales included."""
        return self.n_kv_heads * sum(g.n_bytes + 2 for g in (*self.k, *self.v))

    @property
    def page_bytes(self) -> int:
        return self.page_size * self.token_bytes

    def parts(self, data: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Views of pages data [P, page_bytes] uint8: codes of k, v [P, page_size, Hkv, bytes], scales [..., groups]."""
        shape, found, at = (self.page_size, self.n_kv_heads), [], 0
        for groups, width in ((self.k, 0), (self.v, 0), (self.k, 2), (self.v, 2)):
            n = 2 * len(groups) if width else sum(g.n_bytes for g in groups)
            part = data[:, at : at + math.prod(shape) * n]
            part = part.view(torch.float16) if width else part
            found.append(part.unflatten(-1, (*shape, -1)))
            at += math.prod(shape) * n
        k, v, k_scale, v_scale = found
        return k, v, k_scale, v_scale


def turned(groups: tuple[Group, ...]) -> bool:
    """Whether vectors of these groups are rotated before they are coded."""
    return groups[0].bits < 8


@lru_cache
def codebook(bits: int, width: int) -> Tensor:
    """Lloyd-Max levels [2**bits] fp64, rising, for a coordinate of a random vector [width] of length sqrt(width).

    Its density is proportional to (1 - t*t / width) ** ((width - 3) / 2), and symmetric: so are the levels.
    """
    return _lloyd_max(bits, width)[0]


@lru_cache
def lloyd_max_error(bits: int, width: int) -> float:
    """Mean square error of `codebook` for its density, whose variance is 1."""
    return _lloyd_max(bits, width)[1]


@lru_cache
def _lloyd_max(bits: int, width: int) -> tuple[Tensor, float]:
    """Alternate centroids and midpoints over integrals of the positive half on a fine grid."""
    t = torch.linspace(0, min(math.sqrt(width), 12.0), 1 << 16, dtype=torch.float64)
    density = (1 - t * t / width).clamp(min=0) ** ((width - 3) / 2)
    density[0] /= 2  # the trapezoid's ends
    mass, moment = (torch.cat((t.new_zeros(1), (density * t**n).cumsum(0))) for n in (0, 1))
    step, total = float(t[1]), float(mass[-1])
    levels = (torch.arange(1 << (bits - 1), dtype=torch.float64) + 0.5) * (5.0 / 2**bits)

    def integrals(edges: Tensor) -> tuple[Tensor, Tensor]:
        """Mass and first moment between the edges, linear within a step of the grid."""
        at = edges / step + 0.5
        low = at.floor().clamp(max=len(t) - 1).long()
        part = (at - low).clamp(max=1.0)
        found = [(s[low] * (1 - part) + s[low + 1] * part).diff() for s in (mass, moment)]
        return found[0], found[1]

    for _ in range(4000):
        edges = torch.cat((t.new_zeros(1), (levels[1:] + levels[:-1]) / 2, t[-1:]))
        here, first = integrals(edges)
        new = first / here
        done = float((new - levels).abs().max()) < 1e-12
        levels = new
        if done:
            break
    variance = float((density * t * t).sum()) / total
    error = variance - float((here * levels * levels).sum()) / total
    return torch.cat((-levels.flip(0), levels)), error


def _signs(width: int) -> Tensor:
    """`width` signs of a fixed generator (splitmix64), the same everywhere and for ever."""
    state, found = (VERSION << 32) + width, []
    for _ in range(width):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        found.append(1.0 if (z ^ (z >> 31)) & 1 else -1.0)
    return torch.tensor(found, dtype=torch.float64)


def orthogonal(width: int) -> Tensor:
    """A Hadamard matrix of the largest power of two in `width`, times a cosine transform of what is left: fp64."""
    rest, mixed = width, torch.ones(1, 1, dtype=torch.float64)
    while rest % 2 == 0:
        mixed = torch.cat((torch.cat((mixed, mixed), 1), torch.cat((mixed, -mixed), 1))) / math.sqrt(2)
        rest //= 2
    n = torch.arange(rest, dtype=torch.float64)
    cosine = torch.cos(math.pi / rest * (n[None] + 0.5) * n[:, None]) * math.sqrt(2 / rest)
    cosine[0] /= math.sqrt(2)
    return torch.kron(mixed, cosine)


def rotation(groups: tuple[Group, ...], order: Tensor | None = None) -> Tensor:
    """R [D, D] fp64, orthogonal: x @ R are the coordinates that get coded. `order` [D] names channels, outliers first.

    Each group is turned by itself: random signs, then `orthogonal`.
    """
    blocks = [torch.diag(_signs(g.width)) @ orthogonal(g.width) for g in groups]
    turn = torch.block_diag(*blocks)
    if order is None:
        return turn
    placed = torch.empty_like(turn)
    placed[order.cpu()] = turn
    return placed


def pack(codes: Tensor, bits: int) -> Tensor:
    """codes [..., n] below 2**bits -> uint8 [..., n * bits / 8], as `Group` says."""
    planes, shift = [], 0
    for p in PLANES[bits]:
        parts = ((codes.int() >> shift) & ((1 << p) - 1)).unflatten(-1, (8 // p, -1))
        at = torch.arange(0, 8, p, device=codes.device, dtype=torch.int32)[:, None]
        planes.append((parts << at).sum(-2).to(torch.uint8))
        shift += p
    return torch.cat(planes, -1)


def unpack(data: Tensor, bits: int) -> Tensor:
    """Undo `pack`: uint8 [..., n * bits / 8] -> int32 [..., n]."""
    n, codes, at, shift = data.shape[-1] * 8 // bits, None, 0, 0
    for p in PLANES[bits]:
        plane = data[..., at : at + n * p // 8].int()
        shifts = torch.arange(0, 8, p, device=data.device, dtype=torch.int32)[:, None]
        part = ((plane[..., None, :] >> shifts) & ((1 << p) - 1)).flatten(-2) << shift
        codes = part if codes is None else codes | part
        at, shift = at + n * p // 8, shift + p
    assert codes is not None
    return codes


def quantize_ref(x: Tensor, groups: tuple[Group, ...]) -> tuple[Tensor, Tensor]:
    """x [..., D], rotated where `turned` -> codes uint8 [..., bytes], scales fp16 [..., groups].

    The scale makes the decoded vector's product with x what x's own is, so that over rotations it is x on average, and
    scores and sums of values are not drawn to zero (Gao & Long: RaBitQ, arXiv 2405.12497). For e4m3 it is the largest
    magnitude over 448.
    """
    codes, scales = [], []
    for part, g in zip(x.float().split([g.width for g in groups], -1), groups, strict=True):
        if g.bits == 8:
            scale = (part.abs().amax(-1, keepdim=True) / E4M3_MAX).clamp(max=FP16_MAX).half()
            exact = torch.where(scale > 0, part / scale.float(), 0.0)
            codes.append(exact.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8))
        else:
            levels = codebook(g.bits, g.width).to(x.device, torch.float32)
            length = part.square().sum(-1, keepdim=True).sqrt()
            unit = part * (math.sqrt(g.width) / length.clamp(min=1e-30))
            index = torch.bucketize(unit, (levels[1:] + levels[:-1]) / 2)
            product = (part * levels[index]).sum(-1, keepdim=True)
            scale = torch.where(product > 0, length.square() / product, 0.0).clamp(max=FP16_MAX).half()
            codes.append(pack(index, g.bits))
        scales.append(scale)
    return torch.cat(codes, -1), torch.cat(scales, -1)


def dequantize_ref(codes: Tensor, scales: Tensor, groups: tuple[Group, ...]) -> Tensor:
    """codes uint8 [..., bytes], scales fp16 [..., groups] -> fp32 [..., D], still rotated where `turned`."""
    out = []
    parts = codes.split([g.n_bytes for g in groups], -1)
    for part, scale, g in zip(parts, scales.float().split(1, -1), groups, strict=True):
        if g.bits == 8:
            value = part.contiguous().view(torch.float8_e4m3fn).float()
        else:
            value = codebook(g.bits, g.width).to(codes.device, torch.float32)[unpack(part, g.bits)]
        out.append(value * scale)
    return torch.cat(out, -1)


@dataclass(frozen=True)
class Operands:
    """A format as kernels take it beside a page's bytes, for activations of one 16-bit type.

    A rotation is the sum of two 16-bit matrices [2, D, D]. Tables have a row for keys' groups, then one for values'.
    """

    k_parts: Tensor
    v_parts: Tensor
    levels: Tensor  # [2, 2, LEVELS] of the type
    tables: Tensor  # [2, 2, 2, LEVELS] fp32: levels, then the midpoints between them

    @classmethod
    def of(cls, pages: QuantizedPages, dtype: torch.dtype) -> Operands:
        device = pages.data.device
        tables = torch.zeros(2, 2, 2, LEVELS, dtype=torch.float32)
        for i, groups in enumerate((pages.format.k, pages.format.v)):
            for j, g in enumerate(groups):
                if g.bits < 8:
                    levels = codebook(g.bits, g.width).float()
                    tables[i, j, 0, : 1 << g.bits] = levels
                    tables[i, j, 1, : (1 << g.bits) - 1] = (levels[1:] + levels[:-1]) / 2

        def parts(turn: Tensor | None) -> Tensor:
            if turn is None:
                return torch.zeros(1, dtype=dtype, device=device)
            high = turn.to(dtype)
            return torch.stack((high, (turn - high.float()).to(dtype)))

        tables = tables.to(device)
        return cls(parts(pages.k_turn), parts(pages.v_turn), tables[:, :, 0].to(dtype).contiguous(), tables)


@dataclass(frozen=True)
class QuantizedPages:
    """One layer's pages in a format, and the rotations of its keys and values."""

    data: Tensor  # [P, page_bytes] uint8
    format: PageFormat
    k_turn: Tensor | None  # [D, D] fp32; None: keys are coded as they are
    v_turn: Tensor | None  # [D, D] fp32
    _operands: dict[torch.dtype, Operands] = field(default_factory=dict, compare=False, repr=False)

    def operands(self, dtype: torch.dtype) -> Operands:
        """Made once a type: a captured step holds their addresses."""
        if dtype not in self._operands:
            self._operands[dtype] = Operands.of(self, dtype)
        return self._operands[dtype]

    @classmethod
    def allocate(
        cls,
        form: PageFormat,
        n_pages: int,
        device: torch.device,
        k_order: Tensor | None = None,
        v_order: Tensor | None = None,
    ) -> QuantizedPages:
        """Zeroed pages: every vector in them decodes to zeros. The orders are those of `rotation`."""
        both = (form.k, k_order), (form.v, v_order)
        k, v = (rotation(g, order).to(device, torch.float32) if turned(g) else None for g, order in both)
        return cls(torch.zeros(n_pages, form.page_bytes, dtype=torch.uint8, device=device), form, k, v)

    def write(self, k: Tensor, v: Tensor, kv_slot: Tensor) -> None:
        """Code k, v [T, Hkv, D] into kv_slot [T] (page * page_size + entry), in place."""
        page, entry = kv_slot // self.format.page_size, kv_slot % self.format.page_size
        k_codes, v_codes, k_scales, v_scales = self.format.parts(self.data)
        for x, turn, groups, codes, scales in (
            (k, self.k_turn, self.format.k, k_codes, k_scales),
            (v, self.v_turn, self.format.v, v_codes, v_scales),
        ):
            coded = quantize_ref(x.float() if turn is None else x.float() @ turn, groups)
            codes[page, entry], scales[page, entry] = coded

    def read(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values fp32 [n * page_size, Hkv, D] of pages [n], rotated by `k_turn` and `v_turn`."""
        k, v, k_scales, v_scales = (part.flatten(0, 1) for part in self.format.parts(self.data[pages]))
        return dequantize_ref(k, k_scales, self.format.k), dequantize_ref(v, v_scales, self.format.v)
