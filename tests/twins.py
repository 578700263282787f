"""Random fp32 twins: a transformers model and the checkpoint folder that holds its weights."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
)


def make_twin(
    folder: Path,
    *,
    moe: bool = True,
    nested: bool = False,
    tied: bool = False,
    n_layers: int = 4,
    hidden: int = 64,
    seed: int = 0,
    max_positions: int = 1024,
) -> nn.Module:
    """Write the checkpoint of a random model with an MTP head into `folder`; give the transformers model of it."""
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": 300,
        "hidden_size": hidden,
        "num_hidden_layers": n_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": tied,
        "eos_token_id": 2,
        "mtp_num_hidden_layers": 1,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        "dtype": "float32",
    }
    if moe:
        shape |= {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 40,
        }
        config: Any = Qwen3_5MoeTextConfig(**shape)
        model: nn.Module = Qwen3_5MoeForCausalLM(config)
    else:
        config = Qwen3_5TextConfig(**shape, intermediate_size=96)
        model = Qwen3_5ForCausalLM(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "A_log" in name or "dt_bias" in name:
                p.uniform_(-1.0, 1.0)
            elif "norm" in name:
                p.add_(torch.randn_like(p) * 0.2)
            else:
                p.normal_(0, 0.5 if "conv" in name else 0.6 * p.shape[-1] ** -0.5)  # a healthy depth of signal
    model.eval()
    tensors = {k: v.clone().contiguous() for k, v in model.state_dict().items() if not (tied and k == "lm_head.weight")}
    tensors |= mtp_tensors(tensors, hidden)
    if nested:
        tensors = {re.sub(r"^model\.", "model.language_model.", name): t for name, t in tensors.items()}
        tensors["model.visual.patch_embed.proj.weight"] = torch.zeros(2, 2)
    text = config.to_dict()
    kind = "qwen3_5_moe" if moe else "qwen3_5"
    text["model_type"] = f"{kind}_text"
    outer = {"model_type": kind, "text_config": text, "tie_word_embeddings": tied} if nested else text
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(outer), "utf-8")
    save_file(tensors, folder / "model.safetensors")
    return model


def mtp_tensors(main: dict[str, Tensor], hidden: int) -> dict[str, Tensor]:
    """A random MTP head whose layer has the shapes of the main model's last (full-attention) layer."""
    last = max(int(k.split(".")[2]) for k in main if k.startswith("model.layers."))
    prefix = f"model.layers.{last}."
    layer = {k.removeprefix(prefix): v for k, v in main.items() if k.startswith(prefix)}
    made = {f"mtp.layers.0.{k}": torch.randn_like(v) * 0.15 for k, v in layer.items()}
    made["mtp.fc.weight"] = torch.randn(hidden, 2 * hidden) * 0.1
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        made[f"mtp.{name}.weight"] = torch.randn(hidden) * 0.2
    return made
