"""The gated delta rule and its short convolution, as plain mathematics.

S_t = e^{g_t} S_{t-1};  S_t += k_t (beta_t (v_t - S_t^T k_t))^T;  o_t = S_t^T q_t / sqrt(Dk)
(Yang, Kautz, Hatamizadeh: Gated Delta Networks, arXiv 2412.06464). q and k are unit vectors; each key head serves
Hv / Hk consecutive value heads; all arithmetic is fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64


def l2_normalize_ref(x: Tensor, eps: float = 1e-6) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def causal_conv_ref(x: Tensor, history: Tensor, weight: Tensor) -> Tensor:
    """Depthwise causal convolution, SiLU. x [.., T, C], history [.., width-1, C], weight [C, width] -> [.., T, C]."""
    width, rows = weight.shape[1], x.shape[-2]
    inputs = torch.cat((history.to(x.dtype), x), dim=-2)
    out = sum(inputs[..., i : i + rows, :].float() * weight[:, i].float() for i in range(width))
    assert isinstance(out, Tensor)
    return F.silu(out).to(x.dtype)


def delta_rule_step_ref(
    q: Tensor | None, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor | None, Tensor]:
    """One row of B sequences. q, k [B, Hk, Dk], v [B, Hv, Dv], g, beta [B, Hv], state [B, Hv, Dk, Dv] fp32.

    Gives (o [B, Hv, Dv], new state); q None only updates the state. A row with beta = 0 and g = 0 changes nothing.
    """
    group = v.shape[1] // k.shape[1]
    k = k.float().repeat_interleave(group, dim=1)
    state = state * g.float().exp()[..., None, None]
    delta = (v.float() - torch.einsum("bhkv,bhk->bhv", state, k)) * beta.float()[..., None]
    state = state + k[..., None] * delta[..., None, :]
    if q is None:
        return None, state
    q = q.float().repeat_interleave(group, dim=1) * q.shape[-1] ** -0.5
    return torch.einsum("bhkv,bhk->bhv", state, q), state


def delta_rule_recurrent_ref(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """T rows of one sequence, in turn. q, k [T, Hk, Dk], v [T, Hv, Dv], g, beta [T, Hv], state [Hv, Dk, Dv]."""
    out = []
    state = state[None]
    for t in range(q.shape[0]):
        o, state = delta_rule_step_ref(q[t, None], k[t, None], v[t, None], g[t, None], beta[t, None], state)
        assert o is not None
        out.append(o[0])
    return torch.stack(out), state[0]


def delta_rule_chunked_ref(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """The same in chunks: inside a chunk the updates are one triangular solve (the WY form of the delta rule)."""
    rows, group, pad = q.shape[0], v.shape[1] // k.shape[1], -q.shape[0] % chunk

    def chunks(x: Tensor) -> Tensor:  # [T, H, ...] -> [n, H, chunk, ...]
        x = F.pad(x.float(), (0, 0) * (x.dim() - 1) + (0, pad))
        return x.unflatten(0, (-1, chunk)).transpose(1, 2)

    q = chunks(q.repeat_interleave(group, dim=1)) * q.shape[-1] ** -0.5
    k, v = chunks(k.repeat_interleave(group, dim=1)), chunks(v)
    g, beta = chunks(g).cumsum(-1), chunks(beta)  # padded rows have beta 0 and add no decay
    decay = (g[..., :, None] - g[..., None, :]).tril().exp().tril()  # [n, H, i, j]: decay from row j to row i
    k_beta = k * beta[..., None]
    system = torch.eye(chunk, device=q.device) + (k_beta @ k.transpose(-1, -2) * decay).tril(-1)
    solved = torch.linalg.solve_triangular(
        system, torch.cat((v * beta[..., None], k_beta * g.exp()[..., None]), dim=-1), upper=False, unitriangular=True
    )
    value, k_read = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    scores = q @ k.transpose(-1, -2) * decay
    q_read = q * g.exp()[..., None]
    k_write = k * (g[..., -1:] - g).exp()[..., None]
    total = g[..., -1].exp()[..., None, None]
    out = []
    for n in range(q.shape[0]):
        new = value[n] - k_read[n] @ state
        out.append(q_read[n] @ state + scores[n] @ new)
        state = state * total[n] + k_write[n].transpose(-1, -2) @ new
    return torch.stack(out).transpose(1, 2).flatten(0, 1)[:rows], state


def delta_rule_window_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    pending: tuple[Tensor, Tensor, Tensor, Tensor],
    commit: Tensor,
) -> tuple[Tensor, Tensor]:
    """Lazy commit: apply `commit[b]` pending rows to the state, then run the new rows without keeping their effect.

    q, k [B, W, Hk, Dk], v [B, W, Hv, Dv], g, beta [B, W, Hv], state [B, Hv, Dk, Dv]; pending = (k, v, g, beta) of the
    last window, commit [B]. Gives (o [B, W, Hv, Dv], the state after the committed rows and before the new ones).
    """
    state = apply_rows_ref(state, pending, commit)
    out, running = [], state
    for i in range(q.shape[1]):
        o, running = delta_rule_step_ref(q[:, i], k[:, i], v[:, i], g[:, i], beta[:, i], running)
        assert o is not None
        out.append(o)
    return torch.stack(out, dim=1), state


def apply_rows_ref(state: Tensor, pending: tuple[Tensor, Tensor, Tensor, Tensor], commit: Tensor) -> Tensor:
    """The state [B, Hv, Dk, Dv] after the first `commit[b]` rows of the pending window (k, v, g, beta)."""
    k, v, g, beta = pending
    for i in range(int(commit.max()) if commit.numel() else 0):
        keep = (commit > i)[:, None]
        # where, not times: rows past the commit may hold anything, NaN included
        zero = torch.zeros((), dtype=torch.float32, device=state.device)
        row_k = torch.where(keep[..., None], k[:, i].float(), zero)
        row_v = torch.where(keep[..., None], v[:, i].float(), zero)
        _, state = delta_rule_step_ref(
            None,
            row_k,
            row_v,
            torch.where(keep, g[:, i].float(), zero),
            torch.where(keep, beta[:, i].float(), zero),
            state,
        )
    return state


@dataclass(frozen=True)
class WindowWeights:
    """What a window needs beside its projections."""

    conv: Tensor  # [C, 4]
    dt_bias: Tensor  # [Hv] fp32
    a_log: Tensor  # [Hv] fp32
    norm: Tensor  # [Dv]


@dataclass(frozen=True)
class WindowState:
    """Slots of one layer: the state before the pending window, that window's rows, and the convolution's inputs."""

    s: Tensor  # [n_slots, Hv, Dk, Dv] fp32
    k: Tensor  # [n_slots, W, Hk, Dk]
    v: Tensor  # [n_slots, W, Hv, Dv]
    g: Tensor  # [n_slots, W, Hv] fp32
    beta: Tensor  # [n_slots, W, Hv] fp32
    conv: Tensor  # [n_slots, 3 + W, C]


def window_ref(
    mixed: Tensor,
    w: WindowWeights,
    state: WindowState,
    query_start: Tensor,
    state_slot: Tensor,
    commit: Tensor,
    context_len: Tensor,
) -> tuple[Tensor, Tensor]:
    """A whole decode window, one sequence after another; `state` moves. mixed [T, C + Hv Dv + 2 Hv].

    A row of `mixed` is qkv before the convolution, then z, b and a. A sequence with context_len 0 starts from zeros.
    Gives y [T, Hv Dv], the norm's weight and the gate applied, and squares [Hv, 1, T]: each head's sum of squares, by
    whose root mean y is still to be divided.
    """
    _, hv, dk, dv = state.s.shape
    hk, channels = state.k.shape[2], state.conv.shape[2]
    out = torch.empty(mixed.shape[0], hv * dv, dtype=mixed.dtype, device=mixed.device)
    squares = torch.empty(hv, 1, mixed.shape[0], device=mixed.device)
    for b, slot in enumerate(state_slot.tolist()):
        start, end, n = int(query_start[b]), int(query_start[b + 1]), int(commit[b])
        qkv, z, b_in, a_in = mixed[start:end].split((channels, hv * dv, hv, hv), dim=-1)
        history = state.conv[slot, n : n + 3].clone()
        s = apply_rows_ref(
            state.s[slot, None], (state.k[slot, None], state.v[slot, None], state.g[slot, None], state.beta[slot,
            None]),
            commit[b, None],
        )[0]  # fmt: skip
        if int(context_len[b]) == 0:
            history, s = torch.zeros_like(history), torch.zeros_like(s)
        q, k, v = causal_conv_ref(qkv, history, w.conv).split((hk * dk, hk * dk, hv * dv), dim=-1)
        q, k = (l2_normalize_ref(x.unflatten(-1, (hk, dk))) for x in (q, k))
        k = k.to(state.k.dtype).float()  # as the next window will read it
        v = v.unflatten(-1, (hv, dv))
        beta, g = b_in.float().sigmoid(), -w.a_log.float().exp() * F.softplus(a_in.float() + w.dt_bias.float())
        o, _ = delta_rule_recurrent_ref(q, k, v, g, beta, s)
        squares[:, 0, start:end] = o.square().sum(-1).T
        out[start:end] = (o * w.norm.float() * F.silu(z.float()).unflatten(-1, (hv, dv))).flatten(1).to(out.dtype)
        rows = end - start
        state.s[slot] = s
        state.k[slot, :rows], state.v[slot, :rows] = k.to(state.k.dtype), v.to(state.v.dtype)
        state.g[slot, :rows], state.beta[slot, :rows] = g, beta
        state.conv[slot, :3], state.conv[slot, 3 : 3 + rows] = history, qkv.to(state.conv.dtype)
    return out, squares


def prefill_ref(
    mixed: Tensor,
    w: WindowWeights,
    state: WindowState,
    query_start: Tensor,
    state_slot: Tensor,
    commit: Tensor,
    context_len: Tensor,
    eps: float,
) -> Tensor:
    """Rows of prompts, one sequence after another; `state` moves and nothing is pending. mixed as in `window_ref`.

    Gives [T, Hv Dv], normed and gated.
    """
    _, hv, dk, dv = state.s.shape
    hk, channels = state.k.shape[2], state.conv.shape[2]
    out = torch.empty(mixed.shape[0], hv * dv, dtype=mixed.dtype, device=mixed.device)
    for b, slot in enumerate(state_slot.tolist()):
        start, end, n = int(query_start[b]), int(query_start[b + 1]), int(commit[b])
        if start == end:
            continue
        qkv, z, b_in, a_in = mixed[start:end].split((channels, hv * dv, hv, hv), dim=-1)
        history = state.conv[slot, n : n + 3].clone()
        pending = (state.k[slot, None], state.v[slot, None], state.g[slot, None], state.beta[slot, None])
        s = apply_rows_ref(state.s[slot, None].float(), pending, commit[b, None])[0]
        if int(context_len[b]) == 0:
            history, s = torch.zeros_like(history), torch.zeros_like(s)
        q, k, v = causal_conv_ref(qkv, history, w.conv).split((hk * dk, hk * dk, hv * dv), dim=-1)
        q, k = (l2_normalize_ref(x.unflatten(-1, (hk, dk))) for x in (q, k))
        k = k.to(state.k.dtype).float()  # as windows keep it
        v = v.unflatten(-1, (hv, dv))
        beta, g = b_in.float().sigmoid(), -w.a_log.float().exp() * F.softplus(a_in.float() + w.dt_bias.float())
        o, state.s[slot] = delta_rule_recurrent_ref(q, k, v, g, beta, s)
        o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + eps) * w.norm.float()
        out[start:end] = (o * F.silu(z.float()).unflatten(-1, (hv, dv))).flatten(1).to(out.dtype)
        state.conv[slot, :3] = torch.cat((history, qkv.to(state.conv.dtype)))[-3:]
    return out
