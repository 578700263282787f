"""Prompts of a whole model through the prefill kernels against the same model through plain torch, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernels_common import DEVICE, DTYPE, assert_close
from test_kernels_decode import SPEC, model
from torch import Tensor

from onebox.kernels.paged_attention_ref import PAGE_SIZE
from onebox.kernels.turboquant_ref import FORMATS
from onebox.model import layers, moe, qwen3_5
from onebox.model.cache import Cache, KvLayout
from onebox.model.qwen3_5 import Qwen35
from onebox.request import Batch

IDS = torch.randint(0, 64, (2, 140), generator=torch.Generator().manual_seed(4))
TABLE = torch.arange(1, 7).view(2, 3)


def chunk(*parts: tuple[int, int, int]) -> Batch:
    """(sequence, first, end) a part."""
    positions = torch.cat([torch.arange(first, end) for _, first, end in parts])
    owner = torch.cat([torch.full((end - first,), b) for b, first, end in parts])
    lengths = torch.tensor([end - first for _, first, end in parts])
    which = [b for b, _, _ in parts]
    tensors = (
        IDS[owner, positions],
        positions,
        torch.tensor([0, *lengths.cumsum(0).tolist()]),
        torch.tensor([first for _, first, _ in parts]),
        TABLE[which],
        TABLE[owner, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE,
        1 + torch.tensor(which),
        torch.zeros(len(parts), dtype=torch.long),
    )
    most = int(lengths.max())
    return Batch(*(t.to(DEVICE) for t in tensors), window=False, max_query=most, max_context=140)


def prompts(m: Qwen35, *batches: Batch, kv: KvLayout | None = None) -> tuple[list[Tensor], Cache]:
    """Hidden states of each batch, main model then drafter, and what is left in the cache."""
    cache = Cache.allocate(
        SPEC, n_pages=7, n_slots=3, n_snapshots=0, window=3, dtype=DTYPE, device=DEVICE, mtp=True, kv=kv
    )
    done = []
    for batch in batches:
        hidden = m.forward(batch, cache)
        previous = m.store_hidden(hidden, batch, cache)
        done += [hidden, m.draft_forward(batch, previous, cache)]
    return done, cache


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Switch: 16-bit rows through the kernels, or through torch alone."""

    def switch(on: bool) -> None:
        def takes(x: Any) -> bool:
            return on and x.element_size() == 2

        for module in (layers, moe, qwen3_5):
            monkeypatch.setattr(module, "on_gpu", takes)

    return switch


def test_prompts_through_the_kernels_equal_the_reference_path(kernels: Callable[[bool], None]) -> None:
    m = model("bf16")
    batches = chunk((0, 0, 66)), chunk((1, 0, 5), (0, 66, 75))
    kernels(False)
    want, a = prompts(m, *batches)
    kernels(True)
    got, b = prompts(m, *batches)
    for x, y in zip(got, want, strict=True):
        assert_close(x, y, 1e-2)
    for s, t in zip(b.gdn, a.gdn, strict=True):
        assert_close(s.s[1:], t.s[1:], 1e-2)
        assert_close(s.conv[1:, :3], t.conv[1:, :3], 1e-2)
    for kv, other in zip(b.kv, a.kv, strict=True):
        assert_close(kv[1:], other[1:], 1e-2)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) for n in FORMATS])
def test_prompts_over_pages_in_fewer_bits_equal_the_reference_path(kernels: Callable[[bool], None], name: str) -> None:
    m = model("bf16")
    batches = chunk((0, 0, 64)), chunk((1, 0, 5), (0, 64, 70))
    kernels(False)
    want, _ = prompts(m, *batches, kv=KvLayout(name))
    kernels(True)
    got, _ = prompts(m, *batches, kv=KvLayout(name))
    for x, y in zip(got, want, strict=True):
        off = (x.float() - y.float()).norm(dim=-1) / y.float().norm(dim=-1)
        assert torch.isfinite(off).all()
        # a number next to the middle of two levels may be coded as either, and a row's expert be another then
        assert float(off.median()) < 2e-2 and float(off.square().mean().sqrt()) < 0.15, off


@pytest.mark.slow
def test_a_prompt_has_the_same_bits_in_chunks_that_end_at_pages(kernels: Callable[[bool], None]) -> None:
    m = model("bf16")
    kernels(True)
    (whole, _), a = prompts(m, chunk((0, 0, 130)))
    parts, b = prompts(m, chunk((0, 0, 64)), chunk((1, 0, 3), (0, 64, 128)), chunk((0, 128, 130)))
    assert torch.equal(torch.cat((parts[0], parts[2][3:], parts[4])), whole)
    assert torch.equal(b.gdn[0].s[1], a.gdn[0].s[1])
    assert torch.equal(b.kv[0][TABLE[0]], a.kv[0][TABLE[0]])


@pytest.mark.slow
def test_launches_a_layer(kernels: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Six around the delta rule and its projections, five around attention, whatever the number of rows."""
    import triton

    m, launched = model("bf16"), list[str]()
    run = triton.runtime.interpreter.GridExecutor if DEVICE.type == "cpu" else triton.runtime.JITFunction
    name = "__call__" if DEVICE.type == "cpu" else "run"
    before = getattr(run, name)

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        launched.append((self.fn if DEVICE.type == "cpu" else self).__name__)
        return before(self, *args, **kwargs)

    monkeypatch.setattr(run, name, counted)
    kernels(True)
    found = []
    for n in (3, 70):
        launched.clear()
        prompts(m, chunk((0, 0, n)))
        mixers = [x for x in launched if x not in ("_matmul_kernel", "_gate_up_kernel", "_down_kernel")]
        found.append(mixers)
    norms = ["_norm_kernel"]
    delta = ["_convolve_kernel", "_invert_kernel", "_walk_kernel", "_norm_kernel"]
    attention = ["_rotate_kernel", "_attend_kernel"]
    main = [*norms, *delta, *norms, *norms, *attention, *norms, *norms]
    assert found[0] == [*main, *norms, *norms, *norms, *attention, *norms, *norms]
    assert found[1] == found[0]
