"""Spec: the numbers a Qwen3.5 / 3.6 text model is made of. Takes `config.json` as a dict, gives a frozen value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from onebox.errors import CheckpointError

LayerType = Literal["linear_attention", "full_attention"]

MOE_TYPES = ("qwen3_5_moe", "qwen3_5_moe_text")
DENSE_TYPES = ("qwen3_5", "qwen3_5_text")


YARN = ("original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor")
MAX_LAYERS = 1000  # a list is made of them before any tensor says otherwise


@dataclass(frozen=True)
class Spec:
    """Shapes of one model. Heads, widths and counts are numbers of elements; `n_experts` 0 means a dense MLP."""

    hidden: int
    vocab: int
    layer_types: tuple[LayerType, ...]
    # gated attention
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rope_theta: float
    rope_dims: int
    rope_parameters: tuple[tuple[str, Any], ...]
    # gated delta net
    gdn_k_heads: int
    gdn_v_heads: int
    gdn_k_dim: int
    gdn_v_dim: int
    conv_width: int
    # MLP
    n_experts: int
    top_k: int
    expert_width: int
    shared_width: int  # shared expert's width (MoE) or the MLP's (dense)
    # the rest
    n_mtp_layers: int
    max_positions: int
    tied: bool
    norm_eps: float
    eos_token_ids: tuple[int, ...]
    dtype: str

    @property
    def n_layers(self) -> int:
        return len(self.layer_types)

    @property
    def n_gdn_layers(self) -> int:
        return self.layer_types.count("linear_attention")

    @property
    def n_attention_layers(self) -> int:
        return self.layer_types.count("full_attention")

    @property
    def gdn_key_width(self) -> int:
        return self.gdn_k_heads * self.gdn_k_dim

    @property
    def gdn_value_width(self) -> int:
        return self.gdn_v_heads * self.gdn_v_dim

    @property
    def conv_channels(self) -> int:
        return 2 * self.gdn_key_width + self.gdn_value_width

    @property
    def moe(self) -> bool:
        return self.n_experts > 0

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Spec:
        """Read a `config.json`, flat or with a nested `text_config`.

        Raises CheckpointError naming the field that is missing, of the wrong kind, or not supported.
        """
        outer_type = config.get("model_type")
        text: Mapping[str, Any] = config.get("text_config") or config
        if not isinstance(text, Mapping):
            raise CheckpointError(f"config.json: 'text_config' must be an object, got {type(text).__name__}.")
        model_type = text.get("model_type", outer_type)
        if model_type not in MOE_TYPES + DENSE_TYPES:
            supported = ", ".join(MOE_TYPES + DENSE_TYPES)
            raise CheckpointError(f"config.json: model_type {model_type!r} is not supported. Supported: {supported}.")
        moe = model_type in MOE_TYPES

        def number(name: str, default: int | None = None, least: int = 0) -> int:
            value = text.get(name, default)
            if type(value) is not int or not least <= value < 2**31:
                raise CheckpointError(f"config.json: '{name}' must be a whole number from {least} on, got {value!r}.")
            return value

        def flag(name: str, default: bool) -> bool:
            value = text.get(name, config.get(name, default))
            if value is not None and not isinstance(value, bool):
                raise CheckpointError(f"config.json: '{name}' must be true or false, got {value!r}.")
            return bool(value)

        hidden, n_heads = number("hidden_size"), number("num_attention_heads")
        head_dim = number("head_dim", hidden // n_heads if n_heads else 0)
        rope: Any = next((text[n] for n in ("rope_parameters", "rope_scaling") if text.get(n) is not None), {})
        if not isinstance(rope, Mapping):
            raise CheckpointError(f"config.json: 'rope_parameters' must be an object, got {rope!r}.")

        def real(name: str, default: float, most: float = 1e18) -> float:
            value = rope.get(name, text.get(name, default))
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= most:
                raise CheckpointError(f"config.json: '{name}' must be a number above 0 to {most:g}, got {value!r}.")
            return float(value)

        theta = real("rope_theta", 10_000.0)
        partial = real("partial_rotary_factor", 0.25, 1.0)
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type not in ("default", "yarn"):
            raise CheckpointError(f"config.json: rope_type {rope_type!r} is not supported. Supported: default, yarn.")
        if rope_type == "yarn":
            for name in ("factor", *(n for n in YARN if n in rope)):
                real(name, 0.0)
        for name, want in (("hidden_act", "silu"), ("attn_output_gate", True), ("attention_bias", False)):
            if text.get(name, want) != want:
                raise CheckpointError(f"config.json: '{name}' = {text[name]!r} is not supported; expected {want!r}.")
        if moe and text.get("norm_topk_prob", True) is not True:
            raise CheckpointError("config.json: 'norm_topk_prob' = false is not supported; expected true.")

        positions = number("max_position_embeddings", least=1)
        if (
            rope_type == "yarn" and "original_max_position_embeddings" in rope
        ):  # which the published way leaves as it is
            stretched = real("factor", 1.0) * real("original_max_position_embeddings", 1.0)
            positions = max(positions, int(min(stretched, 2**31 - 1)))

        vocab = number("vocab_size")
        every = number("full_attention_interval", 4, 1)
        spec = cls(
            layer_types=_layer_types(text.get("layer_types"), number("num_hidden_layers"), every),
            eos_token_ids=_token_ids(text.get("eos_token_id", config.get("eos_token_id")), vocab),
            hidden=hidden,
            vocab=vocab,
            n_heads=n_heads,
            n_kv_heads=number("num_key_value_heads"),
            head_dim=head_dim,
            rope_theta=theta,
            rope_dims=int(head_dim * partial),
            rope_parameters=tuple(sorted((k, v) for k, v in rope.items() if isinstance(v, (int, float, str, bool)))),
            gdn_k_heads=number("linear_num_key_heads"),
            gdn_v_heads=number("linear_num_value_heads"),
            gdn_k_dim=number("linear_key_head_dim"),
            gdn_v_dim=number("linear_value_head_dim"),
            conv_width=number("linear_conv_kernel_dim"),
            n_experts=number("num_experts") if moe else 0,
            top_k=number("num_experts_per_tok") if moe else 0,
            expert_width=number("moe_intermediate_size") if moe else 0,
            shared_width=number("shared_expert_intermediate_size") if moe else number("intermediate_size"),
            n_mtp_layers=number("mtp_num_hidden_layers", 0),
            max_positions=positions,
            tied=flag("tie_word_embeddings", False),
            norm_eps=real("rms_norm_eps", 1e-6, 1.0),
            dtype=_dtype(text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or "bfloat16"),
        )
        if spec.n_kv_heads == 0 or n_heads % spec.n_kv_heads:
            raise CheckpointError(
                f"config.json: num_attention_heads {n_heads} is no multiple of num_key_value_heads {spec.n_kv_heads}."
            )
        if spec.n_gdn_layers and (spec.gdn_k_heads == 0 or spec.gdn_v_heads % spec.gdn_k_heads):
            raise CheckpointError(
                f"config.json: linear_num_value_heads {spec.gdn_v_heads} is no multiple of "
                f"linear_num_key_heads {spec.gdn_k_heads}."
            )
        if spec.rope_dims % 2:
            raise CheckpointError(
                f"config.json: partial_rotary_factor {partial:g} of head_dim {head_dim} rotates {spec.rope_dims} "
                "dimensions; an even number was expected."
            )
        if moe and not 0 < spec.top_k <= spec.n_experts:
            raise CheckpointError(
                f"config.json: num_experts_per_tok {spec.top_k} must be between 1 and num_experts {spec.n_experts}."
            )
        return spec


def _layer_types(given: object, n_layers: int, every: int) -> tuple[LayerType, ...]:
    """One kind a layer, as listed or one full attention in `every`."""
    if n_layers > MAX_LAYERS:
        raise CheckpointError(f"config.json: 'num_hidden_layers' must be at most {MAX_LAYERS}, got {n_layers}.")
    if given is None:
        return tuple("linear_attention" if (i + 1) % every else "full_attention" for i in range(n_layers))
    if not isinstance(given, list):
        raise CheckpointError(f"config.json: 'layer_types' must be a list, got {given!r}.")
    unknown = [kind for kind in given if kind not in ("linear_attention", "full_attention")]
    if unknown or len(given) != n_layers:
        found = f"unknown {unknown[0]!r}" if unknown else f"{len(given)} entries for {n_layers} layers"
        raise CheckpointError(f"config.json: 'layer_types' is not supported: {found}.")
    return tuple(given)


def _token_ids(given: object, vocab: int) -> tuple[int, ...]:
    """`eos_token_id`: nothing, one id or a list of ids."""
    ids = [] if given is None else given if isinstance(given, list) else [given]
    for each in ids:
        if type(each) is not int or not 0 <= each < vocab:
            raise CheckpointError(f"config.json: 'eos_token_id' must be ids below vocab_size {vocab}, got {each!r}.")
    return tuple(ids)


def _dtype(given: object) -> str:
    if not isinstance(given, str):
        raise CheckpointError(f"config.json: 'dtype' must be a name such as 'bfloat16', got {given!r}.")
    return given
