"""The reference path against transformers, layer types, layouts and both ways of computing."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from onebox.errors import CheckpointError
from onebox.kernels.gated_delta_ref import delta_rule_chunked_ref, delta_rule_recurrent_ref, delta_rule_window_ref
from onebox.model.layers import Rope
from onebox.model.load import load_model
from onebox.model.qwen3_5 import Qwen35
from onebox.model.sequence import Sequences
from onebox.spec import Spec
from tests.twins import make_twin

TWINS = [
    pytest.param({"moe": True, "nested": False, "tied": False}, id="moe-flat"),
    pytest.param({"moe": True, "nested": True, "tied": True}, id="moe-nested-tied"),
    pytest.param({"moe": False, "nested": True, "tied": False}, id="dense-nested"),
    pytest.param({"moe": False, "nested": False, "tied": True}, id="dense-flat-tied"),
    pytest.param({"moe": True, "n_layers": 8, "hidden": 256}, id="moe-8-layers"),
]


@pytest.mark.parametrize("shape", TWINS)
def test_prefill_and_twenty_decode_steps_equal_transformers(tmp_path: Path, shape: dict[str, int]) -> None:
    twin = make_twin(tmp_path, **shape)  # type: ignore[arg-type]
    model = load_model(tmp_path).model
    tokens = torch.randint(0, 300, (1, 90))
    with torch.inference_mode():
        want = twin(tokens).logits[0]
        ours = Sequences(model, 1, 128)
        got = [model.logits(ours.forward(tokens[:, :70])[0])]
        got += [model.logits(ours.forward(tokens[:, i : i + 1])[0]) for i in range(70, 90)]
    assert (torch.cat(got) - want).abs().max() <= 1e-4


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunked_prefill_equals_one_shot(tmp_path: Path, chunk: int) -> None:
    make_twin(tmp_path)
    model = load_model(tmp_path).model
    tokens = torch.randint(0, 300, (2, 100))
    with torch.inference_mode():
        want = Sequences(model, 2, 128).forward(tokens)
        ours = Sequences(model, 2, 128)
        got = torch.cat([ours.forward(part) for part in tokens.split(chunk, dim=1)], dim=1)
    assert (model.logits(got) - model.logits(want)).abs().max() <= 1e-4


def mtp_statement(t: dict[str, Tensor], tokens: Tensor, hidden: Tensor) -> Tensor:
    """The MTP head in plain PyTorch: hidden states that predict tokens[2:], from tokens [T] and hidden [T, H]."""

    def norm(x: Tensor, w: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + w)

    def silu_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T

    embedded = t["model.embed_tokens.weight"][tokens[1:]]
    embedded = norm(embedded, t["mtp.pre_fc_norm_embedding.weight"])
    both = torch.cat((embedded, norm(hidden[:-1], t["mtp.pre_fc_norm_hidden.weight"])), -1)
    x, p = both @ t["mtp.fc.weight"].T, "mtp.layers.0."
    n, y = x.shape[0], norm(x, t[p + "input_layernorm.weight"])
    q, gate = (y @ t[p + "self_attn.q_proj.weight"].T).view(n, 4, 64).split(32, -1)
    k, v = ((y @ t[p + f"self_attn.{name}_proj.weight"].T).view(n, 2, 32).repeat_interleave(2, 1) for name in "kv")
    angle = torch.arange(n)[:, None, None] * 10000.0 ** (-torch.arange(4) / 4)

    def rope(x: Tensor) -> Tensor:
        a, b = x[..., :4], x[..., 4:8]
        turned = (a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos(), x[..., 8:])
        return torch.cat(turned, -1)

    q, k = rope(norm(q, t[p + "self_attn.q_norm.weight"])), rope(norm(k, t[p + "self_attn.k_norm.weight"]))
    scores = torch.einsum("ihd,jhd->hij", q, k) / 32**0.5
    scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
    read = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v) * gate.sigmoid()
    x = x + read.flatten(1) @ t[p + "self_attn.o_proj.weight"].T
    y = norm(x, t[p + "post_attention_layernorm.weight"])
    weight, expert = (y @ t[p + "mlp.gate.weight"].T).softmax(-1).topk(2)
    weight = weight / weight.sum(-1, keepdim=True)
    mlp = [t[p + f"mlp.shared_expert.{name}_proj.weight"] for name in ("gate", "up", "down")]
    out = (y @ t[p + "mlp.shared_expert_gate.weight"].T).sigmoid() * silu_mlp(y, *mlp)
    for i in range(n):
        for w, e in zip(weight[i], expert[i], strict=True):
            gate_up, down = t[p + "mlp.experts.gate_up_proj"][e], t[p + "mlp.experts.down_proj"][e]
            out[i] += w * silu_mlp(y[i], gate_up[:48], gate_up[48:], down)
    return norm(x + out, t["mtp.norm.weight"])


def test_mtp_head_equals_a_plain_statement_of_it(tmp_path: Path) -> None:
    make_twin(tmp_path)
    model = load_model(tmp_path).model
    tokens = torch.randint(0, 300, (1, 40))
    with torch.inference_mode():
        ours = Sequences(model, 1, 64)
        hidden = ours.forward(tokens)[0]
        previous = torch.cat((torch.zeros(1, 64), hidden[:-1]))
        # in two parts, so that the second reads the first's entries
        got = torch.cat([ours.draft(tokens[:, a:b], a, previous[a:b]) for a, b in pairwise((0, 25, 40))])
        want = mtp_statement(load_file(tmp_path / "model.safetensors"), tokens[0], hidden)
    assert (got[1:] - want).abs().max() <= 1e-4


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 200])
def test_chunked_delta_rule_equals_the_recurrence(rows: int) -> None:
    q, k = (F.normalize(torch.randn(rows, 2, 16), dim=-1) for _ in range(2))
    v, g, beta = torch.randn(rows, 4, 24), -torch.rand(rows, 4) * 3, torch.rand(rows, 4)
    state = torch.randn(4, 16, 24)
    for got, want in zip(
        delta_rule_chunked_ref(q, k, v, g, beta, state), delta_rule_recurrent_ref(q, k, v, g, beta, state), strict=True
    ):
        assert (got - want).abs().max() <= 1e-4


@pytest.mark.parametrize("commit", [0, 1, 2, 4])
def test_lazy_commit_of_any_number_of_rows_equals_the_recurrence(commit: int) -> None:
    def rows(n: int) -> tuple[Tensor, ...]:
        q, k = (F.normalize(torch.randn(1, n, 2, 16), dim=-1) for _ in range(2))
        return q, k, torch.randn(1, n, 4, 24), -torch.rand(1, n, 4), torch.rand(1, n, 4)

    (q0, k0, v0, g0, b0), (q, k, v, g, beta) = rows(4), rows(3)
    state = torch.randn(1, 4, 16, 24)
    poison = (k0.clone(), v0.clone(), g0.clone(), b0.clone())
    for pending in poison:
        pending[:, commit:] = torch.nan
    out, after = delta_rule_window_ref(q, k, v, g, beta, state, poison, torch.tensor([commit]))
    want_state = state[0]
    if commit:
        _, want_state = delta_rule_recurrent_ref(*(x[0, :commit] for x in (q0, k0, v0, g0, b0)), state[0])
    want, _ = delta_rule_recurrent_ref(q[0], k[0], v[0], g[0], beta[0], want_state)
    assert (after[0] - want_state).abs().max() <= 1e-5
    assert (out[0] - want).abs().max() <= 1e-5


@pytest.mark.parametrize("max_positions", [262_144, 1_048_576])  # as published, rope_parameters alone are replaced
def test_yarn_frequencies_equal_transformers(max_positions: int) -> None:
    from transformers import Qwen3_5MoeTextConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "yarn",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "factor": 4.0,
        "original_max_position_embeddings": 262144,
        "mrope_section": [11, 11, 10],
    }
    config = Qwen3_5MoeTextConfig(head_dim=256, rope_parameters=rope, max_position_embeddings=max_positions)
    want, scale = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    spec = Spec.from_config(config.to_dict())
    got = Rope.from_spec(spec, torch.device("cpu"))
    assert torch.allclose(got.inv_freq, want, rtol=1e-5)
    assert got.scale == pytest.approx(scale)
    assert spec.max_positions == 1_048_576


def test_bundled_model_runs_in_16_bit_close_to_fp32() -> None:
    folder = Path(__file__).parent.parent / "onebox" / "models" / "tiny"
    tokens = torch.randint(0, 8000, (1, 64))
    logits = []
    for dtype in (torch.float32, torch.bfloat16):
        model: Qwen35 = load_model(folder, dtype=dtype).model
        with torch.inference_mode():
            logits.append(model.logits(Sequences(model, 1, 64).forward(tokens)[0]))
    assert (logits[0] - logits[1]).norm() / logits[0].norm() < 0.05


def test_mtp_tensors_that_the_config_denies_are_not_dropped_silently(tmp_path: Path) -> None:
    make_twin(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 0}), "utf-8")
    with pytest.raises(CheckpointError, match="mtp_num_hidden_layers"):
        load_model(tmp_path)
    assert load_model(tmp_path, mtp=False).model.mtp is None
