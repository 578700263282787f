"""Tensor names. Takes a stored name, gives the canonical one, its part of the model, and whether it is read at all."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from onebox.errors import CheckpointError

Part = Literal[
    "experts",
    "shared",
    "mlp",
    "router",
    "attention",
    "gdn",
    "gates",
    "head",
    "embedding",
    "other",
    "mtp_experts",
    "mtp_dense",
]

_VISION = re.compile(r"^(model\.)?(language_model\.)?(visual|vision_tower|vision_model|multi_modal_projector)\.")
_PREFIXES = (
    "model.language_model.model.",
    "model.language_model.",
    "language_model.model.",
    "language_model.",
    "model.",
)
_ACTIVATION = re.compile(r"\.(input_scale|input_global_scale|k_scale|v_scale|q_scale)$")


def is_vision(stored: str) -> bool:
    return _VISION.match(stored) is not None


def is_activation_scale(name: str) -> bool:
    """Static activation or KV scales, which weight-only arithmetic does not need."""
    return _ACTIVATION.search(name) is not None


def canonical(stored: str) -> str:
    """`model.language_model.layers.0...`, `model.layers.0...` -> `layers.0...`; `mtp.` and `lm_head.` stay."""
    for prefix in _PREFIXES:
        if stored.startswith(prefix):
            return stored[len(prefix) :]
    return stored


def is_mtp(stored: str) -> bool:
    return canonical(stored).startswith("mtp.")


@dataclass(frozen=True)
class Names:
    """Canonical name -> stored name of every text tensor, and the vision tensors that are skipped."""

    stored: dict[str, str]
    vision: tuple[str, ...]

    @classmethod
    def of(cls, tensors: Mapping[str, object]) -> Names:
        stored: dict[str, str] = {}
        vision = []
        for name in tensors:
            if is_vision(name):
                vision.append(name)
                continue
            short = canonical(name)
            if short in stored:
                raise CheckpointError(
                    f"{name}: the checkpoint also holds {stored[short]!r}, which means the same tensor."
                )
            stored[short] = name
        return cls(stored, tuple(vision))


def part_of(name: str) -> Part:
    """Which of the ledger's components a canonical name belongs to."""
    if name.startswith("mtp."):
        if ".experts." in name:
            return "mtp_experts"
        return "mtp_dense" if _is_matrix(name) else "other"
    if name.startswith("lm_head"):
        return "head"
    if name.startswith("embed_tokens"):
        return "embedding"
    if ".mlp.experts." in name:
        return "experts"
    if not _is_matrix(name):
        return "router" if re.search(r"\.mlp\.(gate|shared_expert_gate)\.", name) else "other"
    if ".self_attn." in name:
        return "attention"
    if ".linear_attn." in name:
        return "gates" if re.search(r"\.in_proj_[ab]\.", name) else "gdn"
    return "shared" if ".shared_expert." in name else "mlp"


def _is_matrix(name: str) -> bool:
    return re.search(r"\.([a-z]*_?(q|k|v|o|gate|up|down|out)_proj|in_proj_[a-z]+|fc)\.", name) is not None
