"""LM head against its mathematics: logits, the greedy token, one weight read whatever the rows."""

from __future__ import annotations

import pytest
import torch
from kernels_common import DEVICE, assert_close, make_weight, rows

from onebox.kernels import linear
from onebox.kernels.head import head
from onebox.kernels.head_ref import head_ref


def space() -> linear.Workspace:
    return linear.Workspace.allocate(1 << 20, DEVICE)


@pytest.mark.parametrize("kind", ["int8", "bf16", "fp8"])
@pytest.mark.parametrize("t", [1, 4, 6, 16, 33])
def test_logits_and_best_token_at_any_number_of_rows(kind: str, t: int) -> None:
    x, w = rows(t, 256), make_weight(kind, 1000, 256)
    best, logits = head(x, w, space())
    want_best, want = head_ref(x, w)
    assert logits is not None and want is not None
    assert_close(logits, want, 1e-4)
    assert torch.equal(best, want_best)


def test_the_greedy_token_needs_no_logits() -> None:
    x, w = rows(3, 256), make_weight("int8", 300, 256)
    best, logits = head(x, w, space(), with_logits=False)
    assert logits is None and torch.equal(best, head_ref(x, w)[0])


def test_ties_go_to_the_lowest_token() -> None:
    w = rows(1, 128).expand(400, 128).contiguous()
    assert int(head(rows(1, 128), w, space())[0]) == 0


def test_a_row_has_the_same_logits_alone_and_among_eight() -> None:
    x, w = rows(8, 256), make_weight("int8", 200, 256)
    _, many = head(x, w, space())
    _, one = head(x[5:6], w, space())
    assert many is not None and one is not None and torch.equal(one[0], many[5])
