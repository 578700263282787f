"""The plan of a build: base, donor and recipe -> which tensor comes from where, in which format, in which file."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from onebox.checkpoint.names import Part, canonical, is_vision, part_of
from onebox.checkpoint.reader import FLOATS, WeightReader
from onebox.checkpoint.scheme import PLAIN, Scheme
from onebox.checkpoint.shards import DTYPES
from onebox.errors import CheckpointError, ConfigError
from onebox.kernels.nvfp4_ref import NVFP4_BLOCK
from onebox.kernels.weights import dequantize
from onebox.kernels.weights import rows as rows_of
from onebox.ledger import BUILDS, Build

Action = Literal["copy", "repack", "quantize", "dequantize"]
Output = tuple[str, torch.dtype, tuple[int, ...]]
KINDS = {"bf16": "16-bit", "int4": "int4", "fp8": "fp8", "int8": "int8", "nvfp4": "nvfp4"}
QUANTISED: tuple[Part, ...] = ("experts", "shared", "mlp", "attention", "gdn", "head", "mtp_experts", "mtp_dense")
MATRICES: tuple[Part, ...] = (*QUANTISED, "router", "gates")
CHUNK_ELEMENTS = 1 << 22  # weights quantised at a time
MAIN = ("weight", "qweight", "weight_packed")


@dataclass(frozen=True)
class Matrix:
    """A matrix [n, k] of a source: a module, or rows of one expert inside a tensor of all experts."""

    reader: WeightReader
    module: str
    n: int
    k: int
    scheme: Scheme
    stored: str  # the tensor that holds its values
    first: int = 0  # 16-bit: flat element of `stored` at which the matrix begins

    @classmethod
    def of(cls, reader: WeightReader, module: str) -> Matrix:
        """A module by canonical name, also one expert's where a tensor holds all experts."""
        if module in reader.modules:
            return cls(reader, module, *reader.matrix_shape(module), reader.scheme(module), _main(reader, module))
        experts, _, rest = module.partition(".experts.")
        which = rest.partition(".")[2]
        fused = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}.get(which)
        stored = reader.modules.get(f"{experts}.experts", {}).get(fused or "")
        if stored is None or len(reader.shards.tensors[stored].shape) != 3:
            raise CheckpointError(f"{reader.published(module)}: the checkpoint holds no such tensor.")
        _, n, k = reader.shards.tensors[stored].shape
        rows = n if which == "down_proj" else n // 2
        first = (int(rest.partition(".")[0]) * n + (rows if which == "up_proj" else 0)) * k
        return cls(reader, module, rows, k, PLAIN, stored, first)

    def chunks(self) -> Iterator[tuple[int, Tensor]]:
        """(first row, rows) of at most CHUNK_ELEMENTS weights or so, 16-bit as stored or dequantised."""
        step = max(CHUNK_ELEMENTS // self.k // 128, 1) * 128
        loaded = None if self.scheme.kind == "16-bit" else self.reader.read_module(self.module)
        for start in range(0, self.n, step):
            count = min(step, self.n - start)
            if loaded is None:
                first = self.first + start * self.k
                yield start, self.reader.shards.read_part(self.stored, first, (count, self.k))
            else:
                yield start, dequantize(rows_of(loaded, slice(start, start + count)))


@dataclass(frozen=True)
class Item:
    """One module, or one tensor that is no matrix, of the output."""

    name: str  # canonical
    part: Part
    action: Action
    source: str  # "base" or "donor"
    inputs: tuple[str, ...]  # stored names read
    outputs: tuple[Output, ...]
    scheme: Scheme
    reader: WeightReader
    matrix: Matrix | None = None
    partner: Matrix | None = None  # shares the NVFP4 global scale
    note: str = ""

    @property
    def nbytes(self) -> int:
        return sum(_nbytes(o) for o in self.outputs)


@dataclass(frozen=True)
class Plan:
    """What a build will do. `shards` are the items of each file, in order."""

    recipe: Build
    items: tuple[Item, ...]
    shards: tuple[tuple[Item, ...], ...]
    config: dict[str, Any]
    donor_notes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.items)

    def file_names(self) -> tuple[str, ...]:
        n = len(self.shards)
        return tuple(f"model-{i + 1:05d}-of-{n:05d}.safetensors" for i in range(n))

    def totals(self) -> dict[tuple[str, str], int]:
        """Bytes by (part, format)."""
        totals: Counter[tuple[str, str]] = Counter()
        for item in self.items:
            totals[item.part, item.scheme.kind] += item.nbytes
        return dict(totals)

    def lines(self) -> Iterator[str]:
        """tensor -> source -> format -> bytes, one line an item."""
        for item in self.items:
            note = f"  ({item.note})" if item.note else ""
            yield f"{item.name}  {item.source} {item.action} -> {item.scheme}  {item.nbytes:,} B{note}"


def _nbytes(output: Output) -> int:
    n = output[1].itemsize
    for size in output[2]:
        n *= size
    return n


def recipe_for(base: WeightReader, name: str | None) -> Build:
    """A recipe by the ledger's name; None is the hybrid, or NVFP4 where the base's experts are NVFP4 already."""
    if name is None:
        expert = next((m for m in base.modules if m.endswith(".mlp.experts.0.gate_proj") and m[:4] != "mtp."), None)
        name = "nvfp4" if expert and base.scheme(expert).kind == "nvfp4" else "hybrid"
    if name not in BUILDS:
        raise ConfigError(f"recipe {name!r} is not known. Known: {', '.join(BUILDS)}.")
    return BUILDS[name]


@dataclass(frozen=True)
class PlanOptions:
    """`mtp` is recipe, keep, drop or a format; `group` is for INT4 made here; `shard_bytes` is a file's most."""

    recipe: Build
    group: int = 128
    mtp: str = "recipe"
    shard_bytes: int = 4_000_000_000
    vision: bool = True
    by_layer: bool = False  # items in order of layers, for a Quantizer that walks them

    def __post_init__(self) -> None:
        if self.group not in (32, 64, 128):
            raise ConfigError(f"group must be 32, 64 or 128, got {self.group}.")
        if self.mtp not in ("recipe", "keep", "drop", *KINDS):
            raise ConfigError(f"mtp must be recipe, keep, drop or one of {', '.join(KINDS)}; got {self.mtp!r}.")
        if self.shard_bytes < 1:
            raise ConfigError(f"shard_bytes must be at least 1, got {self.shard_bytes}.")


def plan(base: WeightReader, donor: WeightReader | None, options: PlanOptions) -> Plan:
    """Decide every tensor of the output before one is read.

    Raises CheckpointError when base and donor do not fit each other, or a format cannot be reached from what is there.
    """
    planner = _Planner(base, donor, options)
    if donor is not None:
        planner.check_donor_config(donor)
    items = tuple(planner.items())
    if options.by_layer:
        items = tuple(sorted(items, key=lambda item: _layer(item.name)))
    return Plan(
        recipe=options.recipe,
        items=items,
        shards=_shards(items, options.shard_bytes),
        config=planner.config(items),
        donor_notes=planner.donor_notes(items),
    )


def _layer(name: str) -> float:
    if name.startswith("mtp."):
        return math.inf
    head = name.split(".", 2)
    return int(head[1]) if head[0] == "layers" else -1


def _shards(items: tuple[Item, ...], shard_bytes: int) -> tuple[tuple[Item, ...], ...]:
    shards: list[list[Item]] = [[]]
    size = 0
    for item in items:
        if shards[-1] and size + item.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(item)
        size += item.nbytes
    return tuple(tuple(shard) for shard in shards)


@dataclass
class _Planner:
    base: WeightReader
    donor: WeightReader | None
    options: PlanOptions

    def items(self) -> Iterator[Item]:
        base = self.base
        order = sorted(base.shards.tensors.values(), key=lambda info: (info.file.name, info.start))
        done: set[str] = set()
        for info in order:
            if is_vision(info.name):
                if self.options.vision:
                    yield self._copy(info.name, info.name, "other", note="vision, not read by onebox")
                continue
            name = canonical(info.name)
            if self.options.mtp == "drop" and name.startswith("mtp."):
                continue
            module, _, suffix = name.rpartition(".")
            part = part_of(name if suffix in ("gate_up_proj", "down_proj") else f"{module}.")
            if suffix in ("gate_up_proj", "down_proj") and module.endswith(".experts"):
                yield from self._fused(module, suffix, part)
            elif part in MATRICES:
                if module not in done and suffix in MAIN:
                    done.add(module)
                    yield self._module(module, part)
                elif suffix not in MAIN and not any(s in base.modules[module] for s in MAIN):
                    raise CheckpointError(f"{info.name}: belongs to no weight; the checkpoint is incomplete.")
            else:
                yield self._copy(name, info.name, part)
        if "lm_head" not in base.modules and KINDS[self.options.recipe.head] != "16-bit":
            yield self._tied_head()

    def _copy(self, name: str, stored: str, part: Part, note: str = "") -> Item:
        info = self.base.shards.tensors[stored]
        output = (stored, DTYPES[info.dtype], info.shape)
        return Item(name, part, "copy", "base", (stored,), (output,), PLAIN, self.base, note=note)

    def _format(self, part: Part) -> str:
        if part not in QUANTISED:
            return "keep"
        if part in ("mtp_experts", "mtp_dense") and self.options.mtp != "recipe":
            return self.options.mtp
        return str(getattr(self.options.recipe, part))

    def _module(self, module: str, part: Part) -> Item:
        base = self.base
        n, k = base.check_module(module)
        matrix = Matrix.of(base, module)
        wanted = self._format(part)
        if wanted == "keep" or KINDS[wanted] == matrix.scheme.kind:
            return self._as_is(matrix, part, "base", base.published(module))
        if wanted == "fp8" and self.donor is not None:
            item = self._from_donor(module, part, n, k)
            if item is not None:
                return item
        exempted = self.base.declared.method != "none" and part in ("experts", "attention", "gdn")
        if exempted and matrix.scheme.kind == "16-bit" and wanted in ("int4", "nvfp4"):
            item = self._as_is(matrix, part, "base", base.published(module))
            return replace(item, note="kept 16-bit: the base exempts it from its own quantisation")
        return self._convert(matrix, part, wanted, base.published(module), self._partner(module))

    def _partner(self, module: str) -> Matrix | None:
        other = {"gate_proj": "up_proj", "up_proj": "gate_proj"}.get(module.rpartition(".")[2])
        if other is None:
            return None
        module = f"{module.rpartition('.')[0]}.{other}"
        return Matrix.of(self.base, module)

    def _as_is(self, matrix: Matrix, part: Part, source: str, published: str) -> Item:
        reader, scheme = matrix.reader, matrix.scheme
        parts = reader.modules[matrix.module]
        inputs = tuple(parts[s] for s in sorted(parts, key=lambda s: (s not in MAIN, s)))
        # the output's config declares one INT4 layout; g_idx is the identity once checked
        if scheme.kind == "int4" and (scheme.packing != "gptq" or scheme.zero_offset != 1 or "g_idx" in parts):
            target = replace(scheme, packing="gptq", zero_offset=1)
            outputs = _outputs(published, matrix.n, matrix.k, target, _scale_dtype(matrix))
            return Item(matrix.module, part, "repack", source, inputs, outputs, target, reader, matrix)
        kept = tuple(
            stored for stored in inputs if stored.rpartition(".")[2] not in ("input_scale", "input_global_scale")
        )
        infos = [reader.shards.tensors[stored] for stored in kept]
        outputs = tuple((f"{published}.{i.name.rpartition('.')[2]}", DTYPES[i.dtype], i.shape) for i in infos)
        return Item(matrix.module, part, "copy", source, kept, outputs, scheme, reader, matrix)

    def _from_donor(self, module: str, part: Part, n: int, k: int) -> Item | None:
        """The donor's FP8; None where base and donor both hold 16 bits, to be quantised here."""
        donor = self.donor
        assert donor is not None
        if module not in donor.modules:
            raise CheckpointError(f"{self.base.published(module)}: the FP8 donor {donor.path} has no such tensor.")
        scheme, shape = donor.scheme(module), donor.check_module(module)
        if shape != (n, k):
            raise CheckpointError(f"{donor.published(module)}: {list(shape)} in the donor, {[n, k]} in the base.")
        if scheme.kind == "16-bit" and self.base.scheme(module).kind == "16-bit":
            return None
        if scheme.kind != "fp8":
            raise CheckpointError(f"{donor.published(module)}: the donor holds {scheme}, FP8 was expected.")
        return self._as_is(Matrix.of(donor, module), part, "donor", self.base.published(module))

    def _convert(self, matrix: Matrix, part: Part, wanted: str, published: str, partner: Matrix | None = None) -> Item:
        found, n, k = matrix.scheme, matrix.n, matrix.k
        target, note = self._target(wanted, n, k)
        if found.kind not in ("16-bit", "fp8") and target.kind != "16-bit":
            way_out = "give an FP8 donor (--fp8-from)" if wanted == "fp8" else f"a recipe with {part} in {found.kind}"
            raise CheckpointError(
                f"{published}: the base holds {found}; making {target} of it would lose twice. Start from 16-bit or "
                f"FP8 weights, or {way_out}."
            )
        if found.kind == "16-bit" and target.kind == "16-bit":
            return replace(self._as_is(matrix, part, "base", published), note=note)
        action: Action = "dequantize" if target.kind == "16-bit" else "quantize"
        outputs = _outputs(published, n, k, target, torch.float16)
        partner = partner if target.kind == "nvfp4" else None
        parts = matrix.reader.modules.get(matrix.module, {"": matrix.stored})
        return Item(
            matrix.module,
            part,
            action,
            "base",
            tuple(parts.values()),
            outputs,
            target,
            matrix.reader,
            matrix,
            partner,
            note,
        )

    def _target(self, wanted: str, n: int, k: int) -> tuple[Scheme, str]:
        kind = KINDS[wanted]
        if kind == "int4":
            group = next((g for g in (128, 64, 32) if g <= self.options.group and k % g == 0), None)
            if group is None or n % 8:
                return PLAIN, f"kept 16-bit: {n} x {k} does not fit INT4 groups"
            note = "" if group == self.options.group else f"group {group}: {k} columns"
            return Scheme("int4", group), note
        if kind == "nvfp4" and k % NVFP4_BLOCK:
            return PLAIN, f"kept 16-bit: {k} columns do not fit NVFP4 blocks"
        return Scheme(kind), ""  # type: ignore[arg-type]

    def _fused(self, module: str, which: str, part: Part) -> Iterator[Item]:
        """All experts of a layer in one tensor: kept whole, or one module an expert when quantised."""
        base = self.base
        stored = base.modules[module][which]
        info, wanted = base.shards.tensors[stored], self._format(part)
        if info.dtype not in FLOATS or len(info.shape) != 3:
            raise CheckpointError(f"{stored}: {info} cannot be read by a build; expected 16-bit [E, N, K].")
        if wanted in ("keep", "bf16"):
            yield self._copy(f"{module}.{which}", stored, part)
            return
        for name in ("gate_proj", "down_proj"):  # both or none: a layer's experts are stored one way
            m = Matrix.of(base, f"{module}.0.{name}")
            scheme, note = self._target(wanted, m.n, m.k)
            if scheme.kind == "16-bit":
                yield self._copy(f"{module}.{which}", stored, part, note=note)
                return
        names = ("gate_proj", "up_proj") if which == "gate_up_proj" else ("down_proj",)
        for i in range(info.shape[0]):
            matrices = [Matrix.of(base, f"{module}.{i}.{name}") for name in names]
            for m, partner in zip(matrices, (*matrices[1:], matrices[0] if len(matrices) > 1 else None), strict=True):
                yield self._convert(m, part, wanted, base.published(m.module), partner)

    def _tied_head(self) -> Item:
        stored = self.base.names.stored.get("embed_tokens.weight")
        if stored is None:
            raise CheckpointError("embed_tokens.weight: the checkpoint holds no such tensor; it is incomplete.")
        n, k = self.base.shards.tensors[stored].shape
        matrix = Matrix(self.base, "embed_tokens", n, k, PLAIN, stored)
        item = self._convert(matrix, "head", self.options.recipe.head, "lm_head")
        return replace(item, name="lm_head", note="from the tied embedding")

    def check_donor_config(self, donor: WeightReader) -> None:
        ours, theirs = (r.config.get("text_config") or r.config for r in (self.base, donor))
        for reader, text in ((self.base, ours), (donor, theirs)):
            if not isinstance(text, dict):
                raise CheckpointError(f"{reader.path / 'config.json'}: 'text_config' must be an object, got {text!r}.")
        for field in ("model_type", "hidden_size", "num_hidden_layers", "num_experts", "moe_intermediate_size"):
            if ours.get(field) != theirs.get(field):
                raise CheckpointError(
                    f"{donor.path / 'config.json'}: the donor is another model: {field} {theirs.get(field)!r}, "
                    f"{ours.get(field)!r} in the base."
                )

    def donor_notes(self, items: tuple[Item, ...]) -> tuple[str, ...]:
        """What becomes of each donor tensor that was read about. Raises for one that the base has no place for."""
        if self.donor is None:
            return ()
        used = {item.name for item in items if item.source == "donor"}
        counts: Counter[str] = Counter()
        strange = []
        for module, parts in self.donor.modules.items():
            experts = module.partition(".experts")[0] + ".experts"
            if module in used:
                counts["taken"] += len(parts)
            elif module in self.base.modules or (".experts." in module and experts in self.base.modules):
                counts["not needed: the base has its own"] += len(parts)
            elif module.startswith("mtp.") and not self.base.has_mtp():
                counts["not needed: the base has no MTP head"] += len(parts)
            else:
                strange += list(parts.values())
        if strange:
            raise CheckpointError(
                f"{strange[0]}: the donor has this tensor, the base has no place for it ({len(strange)} such tensors)."
            )
        return tuple(f"{count} donor tensors {what}" for what, count in sorted(counts.items()))

    def config(self, items: tuple[Item, ...]) -> dict[str, Any]:
        """config.json of the output: the base's, with the formats declared the way AutoRound declares them."""
        config = {k: v for k, v in self.base.config.items() if k != "quantization_config"}
        text = dict(config["text_config"]) if isinstance(config.get("text_config"), dict) else config
        text.pop("quantization_config", None)
        if self.options.mtp == "drop":
            text["mtp_num_hidden_layers"] = 0
        if any(item.note == "from the tied embedding" for item in items):
            text["tie_word_embeddings"] = config["tie_word_embeddings"] = False
        if text is not config:
            config["text_config"] = text
        quantization = self._quantization(items)
        if quantization:
            config["quantization_config"] = quantization
        return config

    def _quantization(self, items: tuple[Item, ...]) -> dict[str, Any]:
        schemes: dict[str, Scheme] = {}  # module, or regex for all experts of a layer -> scheme
        for item in items:
            if item.part not in MATRICES:
                continue
            module = item.outputs[0][0].rpartition(".")[0]
            head, dot, _ = module.partition(".experts.")
            start = "" if head.startswith(("model.", "mtp.")) else "^"
            key = start + head.replace(".", r"\.") + r"\.experts\..*" if dot else module
            if schemes.setdefault(key, item.scheme) != item.scheme:
                schemes[module] = item.scheme  # an exact name goes before a pattern
        if all(scheme == PLAIN for scheme in schemes.values()):
            return {}
        int4 = [s for s in schemes.values() if s.kind == "int4"]
        default = Counter(int4 or [s for s in schemes.values() if s != PLAIN]).most_common(1)[0][0]
        return {
            "quant_method": "auto-round",
            "packing_format": "auto_round:auto_gptq",
            **_declare(default),
            "extra_config": {name: _declare(s) for name, s in schemes.items() if s != default},
        }


def _declare(scheme: Scheme) -> dict[str, Any]:
    if scheme.kind == "int4":
        return {"bits": 4, "data_type": "int", "group_size": scheme.group, "sym": scheme.sym}
    if scheme.kind == "fp8":
        return {"bits": 8, "data_type": "fp", "group_size": list(scheme.block), "sym": True}
    if scheme.kind == "int8":
        return {"bits": 8, "data_type": "int", "group_size": -1, "sym": True}
    if scheme.kind == "nvfp4":
        return {"bits": 4, "data_type": "nv_fp", "group_size": NVFP4_BLOCK, "sym": True}
    return {"bits": 16, "data_type": "float"}


def _main(reader: WeightReader, module: str) -> str:
    parts = reader.modules[module]
    return next(parts[s] for s in MAIN if s in parts)


def _scale_dtype(matrix: Matrix) -> torch.dtype:
    parts = matrix.reader.modules[matrix.module]
    return DTYPES[matrix.reader.shards.tensors[parts.get("scales", parts.get("weight_scale", ""))].dtype]


def _outputs(published: str, n: int, k: int, scheme: Scheme, scale: torch.dtype) -> tuple[Output, ...]:
    """Names, dtypes and shapes of a matrix as this build stores it."""
    w = f"{published}.weight"
    if scheme.kind == "int4":
        g = k // (k if scheme.group == -1 else scheme.group)
        return (
            (f"{published}.qweight", torch.int32, (k // 8, n)),
            (f"{published}.qzeros", torch.int32, (g, n // 8)),
            (f"{published}.scales", scale, (g, n)),
        )
    if scheme.kind == "fp8":
        blocks = (-(-n // scheme.block[0]), -(-k // scheme.block[1]))
        return (w, torch.float8_e4m3fn, (n, k)), (f"{w}_scale_inv", torch.float32, blocks)
    if scheme.kind == "int8":
        return (w, torch.int8, (n, k)), (f"{w}_scale", torch.float32, (n, 1))
    if scheme.kind == "nvfp4":
        return (
            (w, torch.uint8, (n, k // 2)),
            (f"{w}_scale", torch.float8_e4m3fn, (n, k // NVFP4_BLOCK)),
            (f"{w}_scale_2", torch.float32, ()),
        )
    return ((w, torch.bfloat16, (n, k)),)


def describe(recipe: Build) -> str:
    """A recipe's name in the ledger, or its parts."""
    name = next((name for name, build in BUILDS.items() if build == recipe), None)
    return name or ", ".join(f"{f.name} {getattr(recipe, f.name)}" for f in fields(recipe))


def folder_files(path: Path) -> list[str]:
    """Files that travel with the weights: tokenizer, template, generation config and the like."""
    skip = {"config.json", "model.safetensors.index.json", "onebox.json", "hf_quant_config.json"}
    keep = (".json", ".jinja", ".txt", ".model")
    return sorted(
        f.name for f in path.iterdir() if f.is_file() and f.suffix in keep and f.name not in skip and f.name[0] != "."
    )
