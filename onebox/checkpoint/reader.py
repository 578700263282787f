"""A checkpoint folder -> weights by canonical name, each tensor read once and none left over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onebox.checkpoint import manifest
from onebox.checkpoint.autoround import awq_to_int4, gptq_to_int4, packed_to_int4
from onebox.checkpoint.names import Names, is_activation_scale, is_mtp
from onebox.checkpoint.scheme import PLAIN, Declaration, Scheme, declaration
from onebox.checkpoint.shards import DTYPES, Shards, TensorInfo, read_json
from onebox.checkpoint.values import check_values
from onebox.errors import CheckpointError
from onebox.kernels.fp8_ref import Fp8Weight
from onebox.kernels.int4_ref import Int4Weight
from onebox.kernels.int8_ref import Int8Weight
from onebox.kernels.nvfp4_ref import NVFP4_BLOCK, Nvfp4Weight
from onebox.kernels.weights import Weight, cat, format_name, nbytes, row_scale, same_format, tensors, with_tensors

FLOATS = ("BF16", "F16", "F32")
# a quantiser's default leaves these alone without saying so
UNLISTED = ("lm_head", "mtp.")
UNLISTED_ENDS = (".gate", ".shared_expert_gate", ".in_proj_a", ".in_proj_b")


@dataclass(frozen=True)
class LoadReport:
    """What a load met. `formats` is bytes in memory by the ledger's format names."""

    path: Path
    tensors: int
    formats: Mapping[str, int]
    mtp: bool
    vision_tensors: int
    activation_scales: int
    side_files: tuple[str, ...]

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in sorted(self.formats.items()))
        text = f"{self.tensors} tensors ({sizes}), MTP head {'loaded' if self.mtp else 'not loaded'}"
        if self.vision_tensors:
            text += f"; {self.vision_tensors} vision tensors skipped: images are not supported"
        if self.activation_scales:
            text += f"; {self.activation_scales} activation scales not needed"
        return text


@dataclass
class WeightReader:
    """Reads each tensor of a folder once, in the format that config.json declares; `finish` accounts for all.

    Names are canonical: `layers.0.self_attn.q_proj`, `lm_head`, `mtp.fc`, without the published prefix.
    Every method raises CheckpointError naming the tensor and the finding.
    """

    path: Path
    config: dict[str, Any]
    shards: Shards
    names: Names
    declared: Declaration
    prefix: str
    modules: dict[str, dict[str, str]]  # canonical module -> suffix -> stored name
    used: set[str] = field(default_factory=set)
    formats: Counter[str] = field(default_factory=Counter)
    headers_only: bool = False
    taken: dict[str, Tensor] | None = None  # gets every tensor that is read
    schemes: dict[str, Scheme] = field(default_factory=dict)

    @classmethod
    def open(cls, path: str | Path, *, wanted: Callable[[str], bool] | None = None) -> WeightReader:
        """Check config, index and every header of the folder, before any weight is read.

        With `wanted`, only the files that hold a tensor of such a stored name need to be there.
        """
        path = Path(path)
        if not path.is_dir():
            found = "is a file" if path.exists() else "does not exist"
            raise CheckpointError(f"{path}: {found}; expected a checkpoint folder.")
        manifest.check_finished(path)
        config = read_json(path / "config.json")
        declared = declaration(config, path)
        shards = Shards.open(path, is_mtp=is_mtp, wanted=wanted)
        names = Names.of(shards.tensors)
        modules: dict[str, dict[str, str]] = {}
        for name, stored in names.stored.items():
            module, _, suffix = name.rpartition(".")
            modules.setdefault(module, {})[suffix] = stored
        embedding = names.stored.get("embed_tokens.weight", "model.embed_tokens.weight")
        prefix = embedding.removesuffix("embed_tokens.weight")
        return cls(path, config, shards, names, declared, prefix, modules)

    def has_mtp(self) -> bool:
        return any(name.startswith("mtp.") for name in self.names.stored)

    def tensor(self, name: str, shape: Sequence[int]) -> Tensor:
        """A 16- or 32-bit tensor as stored."""
        stored = self.names.stored.get(name)
        if stored is None:
            raise CheckpointError(f"{self.published(name)}: the checkpoint holds no such tensor; it is incomplete.")
        t = self._take(stored, shape, FLOATS)
        self._check(stored, t)
        self.formats[format_name(t)] += nbytes(t)
        return t

    def matrix_shape(self, name: str) -> tuple[int, int]:
        """[n, k] of a linear module, by its stored tensors."""
        scheme, parts = self.scheme(name), self.modules[name]
        main = next(s for s in ("weight", "qweight", "weight_packed") if s in parts)
        shape = self.shards.tensors[parts[main]].shape
        if len(shape) != 2:
            raise CheckpointError(f"{parts[main]}: found {self.shards.tensors[parts[main]]}, expected a matrix.")
        if main == "qweight":
            return (shape[1] * 8, shape[0]) if scheme.packing == "awq" else (shape[1], shape[0] * 8)
        per_element = {"int4": 8, "nvfp4": 2}.get(scheme.kind, 1)
        return shape[0], shape[1] * per_element

    def check_module(self, name: str) -> tuple[int, int]:
        """Like `matrix_shape`, once all tensors of the module have the right shape and dtype. Reads none."""
        n, k = self.matrix_shape(name)
        replace(self, headers_only=True)._linear(name, n, k)
        return n, k

    def read_module(self, name: str, stored: dict[str, Tensor] | None = None) -> Weight:
        """A linear module of whatever size its tensors say. `stored` gets them as they are in the file, by name."""
        reader = self if stored is None else replace(self, taken=stored)
        return reader._linear(name, *self.matrix_shape(name))

    def linear(self, name: str, n: int, k: int) -> Weight:
        """The matrix [n, k] of a linear module, in its container."""
        w = self._linear(name, n, k)
        self.formats[format_name(w)] += nbytes(w)
        return w

    def experts(self, name: str, e: int, inter: int, hidden: int) -> tuple[Weight, Weight]:
        """All experts of a layer: gate and up rows [e, 2 inter, hidden], and down [e, hidden, inter]."""
        if "gate_up_proj" in self.modules.get(name, {}):
            gate_up = self._fused(name, "gate_up_proj", (e, 2 * inter, hidden))
            down = self._fused(name, "down_proj", (e, hidden, inter))
        else:
            gate_ups, downs = _Experts(f"{name}: gate and up", e), _Experts(f"{name}: down", e)
            for i in range(e):
                parts = [self._linear(f"{name}.{i}.{which}_proj", inter, hidden) for which in ("gate", "up")]
                if not same_format(*parts):
                    raise CheckpointError(
                        f"{self.published(name)}.{i}: gate_proj is {_detail(parts[0])}, up_proj is "
                        f"{_detail(parts[1])}; one format was expected."
                    )
                down = self._linear(f"{name}.{i}.down_proj", hidden, inter)
                gate_ups.put(i, parts[0] if self.headers_only else cat(parts))
                downs.put(i, down)
            gate_up, down = gate_ups.weight(), downs.weight()
            if self.headers_only:  # gate stood for both
                self.formats[format_name(gate_up)] += nbytes(gate_up)
        for w in (gate_up, down):
            self.formats[format_name(w)] += nbytes(w)
        return gate_up, down

    def finish(self, *, ignore_mtp: bool = False) -> LoadReport:
        """Close the files. Raises CheckpointError naming tensors that nothing has read."""
        self.shards.close()
        scales = 0
        left = []
        for name, stored in self.names.stored.items():
            if stored in self.used or (ignore_mtp and name.startswith("mtp.")):
                continue
            if is_activation_scale(name):
                scales += 1
            else:
                left.append(stored)
        if left:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            raise CheckpointError(
                f"{self.path}: {len(left)} tensor{'s' * (len(left) > 1)} that the model described by config.json does "
                f"not have: {', '.join(left[:3])}{more}; remove them, or give the config they belong to."
            )
        return LoadReport(
            path=self.path,
            tensors=len(self.used),
            formats=dict(self.formats),
            mtp=self.has_mtp() and not ignore_mtp,
            vision_tensors=len(self.names.vision),
            activation_scales=scales,
            side_files=self.shards.side_files,
        )

    def published(self, name: str) -> str:
        """A canonical name as this checkpoint would spell it."""
        return name if name.startswith(("mtp.", "lm_head")) else self.prefix + name

    def scheme(self, name: str) -> Scheme:
        """The format of a module: what config.json declares, once the stored tensors agree with it."""
        if name in self.schemes:
            return self.schemes[name]
        parts = self.modules.get(name)
        if not parts:
            raise CheckpointError(f"{self.published(name)}: the checkpoint holds no such tensor; it is incomplete.")
        scheme = self.schemes[name] = self._agreed(name, parts)
        return scheme

    def _agreed(self, name: str, parts: Mapping[str, str]) -> Scheme:
        found, holds = self._found(name, parts)
        declared, by_name = self.declared.scheme(name)
        if found == declared.kind:
            return declared
        left_alone = name.startswith(UNLISTED) or name.endswith(UNLISTED_ENDS)
        if found == "16-bit" and not by_name and left_alone and not (name == "lm_head" and self.declared.explicit_head):
            return PLAIN
        raise CheckpointError(
            f"{self.published(name)}: config.json (quant_method {self.declared.method}) declares {declared}, but the "
            f"files hold {holds}; the two must agree."
        )

    def _found(self, name: str, parts: Mapping[str, str]) -> tuple[str, str]:
        info = {suffix: self.shards.tensors[stored] for suffix, stored in parts.items()}
        if "qweight" in info:
            return "int4", "INT4 (qweight)"
        if "weight_packed" in info:
            if info["weight_packed"].dtype == "U8":
                return "nvfp4", "NVFP4 (weight_packed U8)"
            return "int4", f"INT4 (weight_packed {info['weight_packed'].dtype})"
        if "weight" not in info:
            raise CheckpointError(
                f"{self.published(name)}: no weight, only {', '.join(sorted(parts))}; the checkpoint is incomplete."
            )
        dtype = info["weight"].dtype
        kinds = {"F8_E4M3": "fp8", "I8": "int8", "U8": "nvfp4", **dict.fromkeys(FLOATS, "16-bit")}
        if dtype not in kinds:
            raise CheckpointError(f"{parts['weight']}: dtype {dtype} is not supported for a weight.")
        return kinds[dtype], f"{kinds[dtype]} (weight {dtype})" if kinds[dtype] != "16-bit" else f"a {dtype} weight"

    def _linear(self, name: str, n: int, k: int) -> Weight:
        w = self._packed(name, n, k)
        self._check(self.published(name), w)
        return w

    def _check(self, name: str, w: Weight) -> None:
        if not self.headers_only:
            check_values(name, w)

    def _packed(self, name: str, n: int, k: int) -> Weight:
        scheme = self.scheme(name)
        parts = self.modules[name]
        if scheme.kind == "16-bit":
            return self._take(parts["weight"], (n, k), FLOATS)
        if scheme.kind == "int4":
            return self._int4(name, parts, scheme, n, k)
        if scheme.kind == "fp8":
            return self._fp8(name, parts["weight"], ("weight_scale_inv", "weight_scale"), scheme, (n, k))
        if scheme.kind == "int8":
            scale = self._scale(name, ("weight_scale",), "INT8")
            shape = self.shards.tensors[scale].shape
            q = self._take(parts["weight"], (n, k), ("I8",))
            return Int8Weight(q, self._take(scale, (n, 1) if len(shape) == 2 else (n,), FLOATS).view(n).float())
        return self._nvfp4(name, parts, n, k)

    def _int4(self, name: str, parts: Mapping[str, str], scheme: Scheme, n: int, k: int) -> Int4Weight:
        group = k if scheme.group == -1 else scheme.group
        if k % group or k % 8 or n % 8:
            raise CheckpointError(f"{self.published(name)}: {n} x {k} cannot be INT4 in groups of {group}.")
        if not scheme.sym and parts.keys().isdisjoint(("qzeros", "weight_zero_point")):
            raise CheckpointError(f"{self.published(name)}: asymmetric INT4 is declared, but there are no zero points.")
        if scheme.packing == "packed":
            scale = self._take(self._scale(name, ("weight_scale",), "INT4"), (n, k // group), ("F16", "BF16"))
            q = self._take(parts["weight_packed"], (n, k // 8), ("I32",))
            if "weight_shape" in parts:
                shape = self._take(parts["weight_shape"], (2,), ("I64", "I32"))
                if not self.headers_only and shape.tolist() != [n, k]:
                    raise CheckpointError(f"{parts['weight_shape']}: says {shape.tolist()}, expected {[n, k]}.")
            zero = None
            if "weight_zero_point" in parts:
                zero = self._take(parts["weight_zero_point"], (n // 8, k // group), ("I32",))
            if self.headers_only:
                return Int4Weight(_meta((n, k // 2), torch.uint8), scale, zero, group)
            w = packed_to_int4(q, scale, zero, group)
        else:
            if "qweight" not in parts:
                raise CheckpointError(f"{self.published(name)}: no 'qweight'; config.json declares {scheme}.")
            awq = scheme.packing == "awq"
            scales = self._take(self._scale(name, ("scales",), "INT4"), (k // group, n), ("F16", "BF16"))
            qweight = self._take(parts["qweight"], (k, n // 8) if awq else (k // 8, n), ("I32",))
            qzeros = self._take(parts["qzeros"], (k // group, n // 8), ("I32",)) if "qzeros" in parts else None
            if "g_idx" in parts:
                g_idx = self._take(parts["g_idx"], (k,), ("I32",))
                if not self.headers_only and not torch.equal(g_idx, (torch.arange(k) // group).int()):
                    raise CheckpointError(
                        f"{parts['g_idx']}: columns are not in order of their groups (desc_act); not supported."
                    )
            if self.headers_only:
                return Int4Weight(_meta((n, k // 2), torch.uint8), scales, qzeros, group)
            if awq:
                w = awq_to_int4(qweight, scales, qzeros, group)
            else:
                w = gptq_to_int4(qweight, scales, qzeros, group, scheme.zero_offset)
        if scheme.sym and w.zero is not None:
            raise CheckpointError(
                f"{self.published(name)}: config.json declares symmetric INT4, but the zero points are not all 8."
            )
        return w

    def _fp8(self, name: str, weight: str, scales: Sequence[str], scheme: Scheme, shape: Sequence[int]) -> Fp8Weight:
        *lead, n, k = shape
        block = (n if scheme.block[0] == -1 else scheme.block[0], k if scheme.block[1] == -1 else scheme.block[1])
        scale = self._scale(name, scales, "FP8")
        want = (*lead, -(-n // block[0]), -(-k // block[1]))
        single = self.shards.tensors[scale].shape in ((), (1,)) and want == (1, 1)
        s = self._take(scale, self.shards.tensors[scale].shape if single else want, FLOATS)
        return Fp8Weight(self._take(weight, shape, ("F8_E4M3",)), s.float().view(want), block)

    def _nvfp4(self, name: str, parts: Mapping[str, str], n: int, k: int) -> Nvfp4Weight:
        if k % NVFP4_BLOCK:
            raise CheckpointError(f"{self.published(name)}: {k} columns are no multiple of {NVFP4_BLOCK} (NVFP4).")
        divides = "weight_packed" in parts  # compressed-tensors stores the reciprocal
        scale = self._take(self._scale(name, ("weight_scale",), "NVFP4"), (n, k // NVFP4_BLOCK), ("F8_E4M3",))
        stored = self._scale(name, ("weight_global_scale" if divides else "weight_scale_2",), "NVFP4")
        shape = self.shards.tensors[stored].shape
        g = self._take(stored, shape if shape == () else (1,), ("F32",))
        g = g if self.headers_only else g.view(())
        q = self._take(parts["weight_packed" if divides else "weight"], (n, k // 2), ("U8",))
        return Nvfp4Weight(q, scale, g.reciprocal() if divides and not self.headers_only else g)

    def _scale(self, name: str, suffixes: Sequence[str], what: str) -> str:
        for suffix in suffixes:
            if suffix in self.modules[name]:
                return self.modules[name][suffix]
        raise CheckpointError(
            f"{self.published(name)}.{suffixes[0]}: no such scale tensor for the {what} weight; fetch the checkpoint "
            "again, or rebuild it with 'onebox build'."
        )

    def _fused(self, name: str, which: str, shape: Sequence[int]) -> Weight:
        parts = self.modules[name]
        if which not in parts:
            raise CheckpointError(f"{self.published(name)}.{which}: the checkpoint holds no such tensor.")
        info = self.shards.tensors[parts[which]]
        found = {"F8_E4M3": "fp8", **dict.fromkeys(FLOATS, "16-bit")}.get(info.dtype, info.dtype)
        declared, by_name = self.declared.scheme(f"{name}.0.{which}")
        if not by_name:
            declared, by_name = self.declared.scheme(name)
        if found != declared.kind and (found != "16-bit" or by_name or not name.startswith(UNLISTED)):
            raise CheckpointError(
                f"{parts[which]}: config.json (quant_method {self.declared.method}) declares {declared}, but the files "
                f"hold one {info.dtype} tensor for all experts; the two must agree."
            )
        w: Weight
        if found == "16-bit":
            w = self._take(parts[which], shape, FLOATS)
        else:
            w = self._fp8(name, parts[which], (f"{which}_scale_inv", f"{which}_scale"), declared, shape)
        self._check(parts[which], w)
        return w

    def _take(self, stored: str, shape: Sequence[int], dtypes: Sequence[str]) -> Tensor:
        info: TensorInfo = self.shards.tensors[stored]
        if info.shape != tuple(shape) or info.dtype not in dtypes:
            raise CheckpointError(f"{stored}: found {info}, expected {'/'.join(dtypes)} {list(shape)} by config.json.")
        self.used.add(stored)
        if self.headers_only:
            return _meta(info.shape, DTYPES[info.dtype])
        t = self.shards.read(stored)
        if self.taken is not None:
            self.taken[stored] = t
        return t


@lru_cache(maxsize=256)
def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _detail(w: Weight) -> str:
    """A format with what two weights of one container share."""
    kinds = [str(t.dtype).removeprefix("torch.") for t in tensors(w).values()]
    more = f" group {w.group}" if isinstance(w, Int4Weight) else f" block {w.block}" if isinstance(w, Fp8Weight) else ""
    return f"{format_name(w)}{more} ({', '.join(kinds)})"


class _Experts:
    """One container for `e` experts, filled one at a time so that a layer is never in memory twice."""

    def __init__(self, what: str, e: int) -> None:
        self.what, self.e = what, e
        self.first: Weight | None = None
        self.into: dict[str, Tensor] = {}
        self.globals: list[Nvfp4Weight] = []

    def put(self, i: int, w: Weight) -> None:
        values = tensors(w)
        if self.first is None:
            self.first = w
            self.into = {name: t.new_empty((self.e, *t.shape)) for name, t in values.items() if name != "global_scale"}
        if not same_format(self.first, w):
            raise CheckpointError(
                f"{self.what}: expert {i} is {_detail(w)}, expert 0 {_detail(self.first)}; one format was expected."
            )
        if next(iter(values.values())).is_meta:
            return  # by headers only
        for name, into in self.into.items():
            into[i] = values[name]
        if isinstance(w, Nvfp4Weight):
            self.globals.append(replace(w, q=w.q[..., :0], scale=w.scale[..., :0]))

    def weight(self) -> Weight:
        assert self.first is not None, "no experts"
        if isinstance(self.first, Tensor):
            return self.into["weight"]
        fields = dict(self.into)
        if self.globals:
            per_row = any(g.global_scale.ndim for g in self.globals)
            fields["global_scale"] = torch.stack([row_scale(g) if per_row else g.global_scale for g in self.globals])
        return with_tensors(self.first, fields)
