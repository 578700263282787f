"""What config.json declares of weight formats. Takes `quantization_config`, gives a Scheme by module name."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from onebox.checkpoint.shards import read_json
from onebox.errors import CheckpointError

Kind = Literal["16-bit", "int4", "fp8", "int8", "nvfp4"]
METHODS = ("auto-round", "gptq", "awq", "fp8", "compressed-tensors", "modelopt")
GROUPS = (32, 64, 128)


@dataclass(frozen=True)
class Scheme:
    """A declared format. `group` -1 is a whole row; a block size of -1 the whole dimension."""

    kind: Kind
    group: int = -1
    sym: bool = True
    packing: Literal["gptq", "awq", "packed"] = "gptq"
    zero_offset: int = 1
    block: tuple[int, int] = (128, 128)

    def __str__(self) -> str:
        if self.kind == "int4":
            return f"int4 ({'symmetric' if self.sym else 'asymmetric'}, group {self.group}, {self.packing} layout)"
        return f"fp8 (blocks {self.block[0]}x{self.block[1]})" if self.kind == "fp8" else self.kind


PLAIN = Scheme("16-bit")
Rule = Callable[[tuple[str, ...]], Scheme | None]  # by the names a config may use for a module


@dataclass(frozen=True)
class Declaration:
    """Schemes by rule, first match wins; `default` for any other matrix. `method` is for messages."""

    method: str
    rules: tuple[Rule, ...]
    default: Scheme
    explicit_head: bool = False  # the default speaks for the LM head too

    def scheme(self, module: str) -> tuple[Scheme, bool]:
        """The scheme of a canonical module name, and whether a rule names it (rather than the default)."""
        aliases = aliases_of(module)
        for rule in self.rules:
            scheme = rule(aliases)
            if scheme is not None:
                return scheme, True
        return self.default, False


def aliases_of(module: str) -> tuple[str, ...]:
    """The names a config may use for a canonical module name."""
    if module.startswith("lm_head"):
        return (module, f"language_model.{module}")
    return (f"model.language_model.{module}", f"model.{module}", module, f"language_model.model.{module}")


def declaration(config: Mapping[str, Any], folder: Path | None = None) -> Declaration:
    """Read `quantization_config` (or ModelOpt's hf_quant_config.json in `folder`).

    Raises CheckpointError naming the field that is unknown, missing or not supported.
    """
    text = config.get("text_config")
    quant = config.get("quantization_config")
    if quant is None and isinstance(text, Mapping):
        quant = text.get("quantization_config")
    if quant is None and folder is not None and (folder / "hf_quant_config.json").exists():
        inner = read_json(folder / "hf_quant_config.json").get("quantization")
        if not isinstance(inner, Mapping):
            raise CheckpointError(f"{folder / 'hf_quant_config.json'}: 'quantization' must be an object.")
        quant = {**inner, "quant_method": "modelopt"}
    if quant is None:
        return Declaration("none", (), PLAIN)
    if not isinstance(quant, Mapping):
        raise CheckpointError(f"config.json: 'quantization_config' must be an object, got {type(quant).__name__}.")
    method = str(quant.get("quant_method", "")).lower().replace("_", "-").replace("intel/", "")
    readers = {
        "auto-round": _auto_round,
        "gptq": _gptq,
        "awq": _awq,
        "fp8": _fp8,
        "compressed-tensors": _compressed_tensors,
        "modelopt": _modelopt,
        "modelopt-fp4": _modelopt,
    }
    if method not in readers:
        raise CheckpointError(
            f"config.json: quant_method {quant.get('quant_method')!r} is not supported. "
            f"Supported: {', '.join(METHODS)}."
        )
    return readers[method](quant)


def _refuse(field: str, value: object, want: str) -> CheckpointError:
    return CheckpointError(f"config.json: quantization_config.{field} = {value!r} is not supported; expected {want}.")


def _int4(bits: object, group: object, sym: object, where: str = "") -> Scheme:
    if bits != 4:
        raise _refuse(f"{where}bits", bits, "4")
    if group not in (*GROUPS, -1):
        raise _refuse(f"{where}group_size", group, "32, 64, 128 or -1")
    if not isinstance(sym, bool):
        raise _refuse(f"{where}sym", sym, "true or false")
    return Scheme("int4", int(group), sym)


def _block(value: object, field: str) -> tuple[int, int]:
    """Rows and columns of an FP8 block; -1 is the whole dimension."""
    if isinstance(value, list) and len(value) == 2 and all(type(b) is int and (b > 0 or b == -1) for b in value):
        return value[0], value[1]
    raise _refuse(field, value, "two block sizes, such as [128, 128]")


def _flag(quant: Mapping[str, Any], field: str, default: bool) -> bool:
    value = quant.get(field, default)
    if value is not None and not isinstance(value, bool):
        raise _refuse(field, value, "true or false")
    return bool(value)


def _exact(schemes: Mapping[str, Scheme]) -> Rule:
    return lambda names: next((schemes[name] for name in names if name in schemes), None)


def _below(modules: Iterable[str], scheme: Scheme) -> Rule:
    """Each module, and any module below it; a bare last name matches at any depth."""
    wanted = frozenset(modules)

    def rule(names: tuple[str, ...]) -> Scheme | None:
        for name in names:
            parts = name.split(".")
            for start in range(len(parts)):
                if any(".".join(parts[start:end]) in wanted for end in range(start + 1, len(parts) + 1)):
                    return scheme
        return None

    return rule


def _matching(match: Callable[[str], object], scheme: Scheme) -> Rule:
    return lambda names: scheme if any(match(name) for name in names) else None


# A repeat of a repeat, or many unbounded repeats: Python's matcher may take hours on one name
_ENDLESS = re.compile(r"[*+}][^()]*\)\s*[*+{]|(\.[*+].*){5}")


def _compile(pattern: str) -> re.Pattern[str]:
    if _ENDLESS.search(pattern):
        raise CheckpointError(
            f"config.json: quantization_config names {pattern!r}, a regex that repeats what repeats; refused."
        )
    try:
        return re.compile(pattern)
    except re.error as error:
        raise CheckpointError(
            f"config.json: quantization_config names {pattern!r}, no valid regex ({error})."
        ) from None


def _names(quant: Mapping[str, Any], *fields: str) -> list[str]:
    for field in fields:
        value = quant.get(field)
        if value is not None:
            if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
                raise _refuse(field, value, "a list of module names")
            return value
    return []


def _auto_round(quant: Mapping[str, Any]) -> Declaration:
    packing = str(quant.get("packing_format", "auto_round:auto_gptq"))
    layouts = {
        "auto_round:auto_gptq": "gptq",
        "auto_round:gptq": "gptq",
        "auto_gptq": "gptq",
        "auto_round:auto_awq": "awq",
        "auto_round:awq": "awq",
    }
    if packing not in layouts:
        raise _refuse("packing_format", packing, "one of " + ", ".join(layouts))

    def entry(values: object, where: str = "") -> Scheme:
        if not isinstance(values, Mapping):
            raise _refuse(where.rstrip("."), values, "an object")
        merged = {"data_type": quant.get("data_type", "int"), **values} if where else values
        bits, kind = merged.get("bits", quant.get("bits")), str(merged.get("data_type", "int"))
        group = merged.get("group_size", quant.get("group_size"))
        if isinstance(bits, int) and bits >= 16:
            return PLAIN
        if bits == 8 and kind.startswith("fp"):
            return Scheme("fp8", block=_block(group, f"{where}group_size"))
        if bits == 8 and kind == "int":
            if group != -1:
                raise _refuse(f"{where}group_size", group, "-1 for INT8")
            return Scheme("int8")
        if bits == 4 and kind.startswith("nv_fp"):
            if group != 16:
                raise _refuse(f"{where}group_size", group, "16 for NVFP4")
            return Scheme("nvfp4")
        if kind != "int":
            raise _refuse(f"{where}data_type", kind, "int, fp or nv_fp")
        return replace(_int4(bits, group, merged.get("sym", quant.get("sym", True)), where), packing=layouts[packing])  # type: ignore[arg-type]

    extra = quant.get("extra_config") or {}
    if not isinstance(extra, Mapping):
        raise _refuse("extra_config", extra, "an object")
    schemes = {name: entry(values, f"extra_config[{name!r}].") for name, values in extra.items()}
    patterns = [name for name in schemes if re.search(r"[*+?^$()\[\]{}|\\]", name)]
    rules = [_exact(schemes), *(_matching(_compile(name).search, schemes[name]) for name in patterns)]
    return Declaration("auto-round", tuple(rules), entry(quant), _flag(quant, "lm_head", False))


def _gptq(quant: Mapping[str, Any]) -> Declaration:
    if _flag(quant, "desc_act", False):
        raise _refuse("desc_act", True, "false (act-order is not supported)")
    version = str(quant.get("checkpoint_format", "gptq"))
    if version not in ("gptq", "gptq_v2"):
        raise _refuse("checkpoint_format", version, "gptq or gptq_v2")
    base = _int4(quant.get("bits"), quant.get("group_size"), quant.get("sym", True))
    base = replace(base, zero_offset=0 if version == "gptq_v2" else 1)
    rules: list[Rule] = []
    dynamic = quant.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise _refuse("dynamic", dynamic, "an object")
    for pattern, values in dynamic.items():
        if not values and not pattern.startswith("-:"):
            continue  # "quantised like the rest": says nothing of its own
        compiled = _compile(pattern[2:] if pattern[:2] in ("-:", "+:") else pattern)
        scheme = PLAIN
        if not pattern.startswith("-:"):
            if not isinstance(values, Mapping):
                raise _refuse(f"dynamic[{pattern!r}]", values, "an object")
            over = _int4(
                values.get("bits", 4),
                values.get("group_size", base.group),
                values.get("sym", base.sym),
                f"dynamic[{pattern!r}].",
            )
            scheme = replace(over, zero_offset=base.zero_offset)
        rules.append(_matching(compiled.match, scheme))
    rules.append(_below(_names(quant, "modules_to_not_convert"), PLAIN))
    return Declaration("gptq", tuple(rules), base, _flag(quant, "lm_head", False))


def _awq(quant: Mapping[str, Any]) -> Declaration:
    if str(quant.get("version", "gemm")).lower() != "gemm":
        raise _refuse("version", quant.get("version"), "gemm")
    bits, group = quant.get("bits", quant.get("w_bit")), quant.get("group_size", quant.get("q_group_size"))
    base = replace(_int4(bits, group, not _flag(quant, "zero_point", True)), packing="awq", zero_offset=0)
    return Declaration("awq", (_below(_names(quant, "modules_to_not_convert"), PLAIN),), base)


def _fp8(quant: Mapping[str, Any]) -> Declaration:
    block = _block(quant.get("weight_block_size"), "weight_block_size")
    exempt = _below(_names(quant, "modules_to_not_convert", "ignored_layers", "exclude_modules"), PLAIN)
    return Declaration("fp8", (exempt,), Scheme("fp8", block=block))


def _ct_weights(weights: Mapping[str, Any], where: str) -> Scheme:
    kind, bits, strategy = weights.get("type", "int"), weights.get("num_bits"), weights.get("strategy")
    group = weights.get("group_size")
    if kind == "float" and bits == 4:
        if group != 16:
            raise _refuse(f"{where}.group_size", group, "16 (NVFP4)")
        return Scheme("nvfp4")
    if kind == "float" and bits == 8:
        blocks = {"block": weights.get("block_structure") or [128, 128], "channel": [1, -1], "tensor": [-1, -1]}
        if not isinstance(strategy, str) or strategy not in blocks:
            raise _refuse(f"{where}.strategy", strategy, "block, channel or tensor for FP8")
        return Scheme("fp8", block=_block(blocks[strategy], f"{where}.block_structure"))
    if kind == "int" and bits == 8 and strategy == "channel" and weights.get("symmetric", True):
        return Scheme("int8")
    if kind == "int" and bits == 4:
        if strategy not in ("group", "channel", None):
            raise _refuse(f"{where}.strategy", strategy, "group or channel for INT4")
        if weights.get("actorder") not in (None, False, "static", "weight"):
            raise _refuse(f"{where}.actorder", weights.get("actorder"), "none (act-order is not supported)")
        scheme = _int4(4, -1 if strategy == "channel" else group, weights.get("symmetric", True), f"{where}.")
        return replace(scheme, packing="packed", zero_offset=0)
    raise CheckpointError(
        f"config.json: quantization_config.{where}: {bits}-bit {kind} by {strategy} is not supported. Supported: "
        "4-bit float (NVFP4), 8-bit float, 4-bit int by group, symmetric 8-bit int by channel."
    )


def _compressed_tensors(quant: Mapping[str, Any]) -> Declaration:
    groups = quant.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise _refuse("config_groups", groups, "an object with at least one group")
    rules = _ct_rules(_names(quant, "ignore"), PLAIN)
    default = PLAIN
    for key, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise _refuse(f"config_groups.{key}.weights", weights, "an object")
        scheme = _ct_weights(weights, f"config_groups.{key}.weights")
        targets = _names(group, "targets")
        if "Linear" in targets:
            default = scheme
        rules += _ct_rules([target for target in targets if target != "Linear"], scheme)
    return Declaration("compressed-tensors", tuple(rules), default)


def _ct_rules(names: list[str], scheme: Scheme) -> list[Rule]:
    patterns = [_compile(name[3:]) for name in names if name.startswith("re:")]
    below = _below((name for name in names if not name.startswith("re:")), scheme)
    return [below, *(_matching(pattern.match, scheme) for pattern in patterns)]


def _modelopt(quant: Mapping[str, Any]) -> Declaration:
    nested = quant.get("quantization") or {}
    if not isinstance(nested, Mapping):
        raise _refuse("quantization", nested, "an object")
    algorithm = str(quant.get("quant_algo") or nested.get("quant_algo") or "")
    if algorithm.upper() != "NVFP4":
        raise _refuse("quant_algo", algorithm or None, "NVFP4")
    group = quant.get("group_size", 16)
    if group != 16:
        raise _refuse("group_size", group, "16")
    names = _names(quant, "ignore", "exclude_modules")
    globs = [re.compile(fnmatch.translate(name)) for name in names if any(c in name for c in "*?[")]
    rules = [_below(names, PLAIN), *(_matching(glob.match, PLAIN) for glob in globs)]
    return Declaration("modelopt", tuple(rules), Scheme("nvfp4"))
