"""Which channels of a layer's keys and values are outliers, where a KV page format codes those with one bit more.

Taken from the weights: of keys, whose heads are normed, the dimensions with the largest norm weights, rotary partners
together since positions mix them; of values the rows of the projection with the largest norms.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onebox.kernels.turboquant_ref import FORMATS
from onebox.kernels.weights import dequantize
from onebox.model.attention import AttentionWeights
from onebox.model.cache import KvLayout
from onebox.model.qwen3_5 import Qwen35
from onebox.spec import Spec


def kv_layout(model: Qwen35, name: str) -> KvLayout | None:
    """Pages in format `name`: bf16 or one of FORMATS; None for auto, the model's own dtype."""
    if name not in FORMATS:
        return KvLayout(torch.bfloat16) if name == "bf16" else None
    mixed = any(outlier != other for outlier, other in FORMATS[name])
    return KvLayout(name, tuple(channels(w, model.spec) for w in _attention_layers(model)) if mixed else ())


def channels(w: AttentionWeights, spec: Spec) -> tuple[Tensor, Tensor]:
    """Dimensions [D] of a layer's keys and of its values, the largest first."""
    k = (1.0 + w.k_norm.float()).square()
    half = spec.rope_dims // 2
    both = (k[:half] + k[half : 2 * half]) / 2
    k = torch.cat((both, both, k[2 * half :]))
    v = dequantize(w.v, torch.float32).square().sum(-1).view(spec.n_kv_heads, spec.head_dim).sum(0)
    return k.argsort(descending=True, stable=True), v.argsort(descending=True, stable=True)


def _attention_layers(model: Qwen35) -> list[AttentionWeights]:
    """In the order of `Cache.kv`."""
    blocks = [*model.layers, model.mtp.block] if model.mtp is not None else list(model.layers)
    return [block.mixer for block in blocks if isinstance(block.mixer, AttentionWeights)]
