"""The gated delta rule and its short convolution, as plain mathematics.

S_t = e^{g_t} S_{t-1};  S_t += k_t (beta_t (v_t - S_t^T k_t))^T;  o_t = S_t^T q_t / sqrt(Dk)
(Yang, Kautz, Hatamizadeh: Gated Delta Networks, arXiv 2412.06464). q and k are unit vectors; each key head serves
Hv / Hk consecutive value heads; all arithmetic is fp32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64


def l2_normalize_ref(x: Tensor, eps: float = 1e-6) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def causal_conv_ref(x: Tensor, history: Tensor, weight: Tensor) -> Tensor:
    """Depthwise causal convolution and SiLU. x [.., T, C], history [.., width-1, C], weight [C, width] -> [.., T, C]."""
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
    """T rows of one sequence, one after another. q, k [T, Hk, Dk], v [T, Hv, Dv], g, beta [T, Hv], state [Hv, Dk, Dv]."""
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
