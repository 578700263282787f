"""Random weights and inputs for the kernel tests. Importing it turns on Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from onebox.kernels.fp8_ref import Fp8Weight  # noqa: E402
from onebox.kernels.int4_ref import Int4Weight  # noqa: E402
from onebox.kernels.int8_ref import Int8Weight  # noqa: E402
from onebox.kernels.nvfp4_ref import Nvfp4Weight  # noqa: E402
from onebox.kernels.weights import Weight  # noqa: E402


def _ordered_dots() -> None:
    """Let the interpreter sum a tile product in fp64, rounded once.

    numpy's fp32 product sums a row in an order that depends on the tile's shape and the processor. A tensor core has
    one order, which "the same bits" stand on.
    """
    from triton.runtime import interpreter

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        exact = np.int64 if np.issubdtype(d.data.dtype, np.integer) else np.float64
        product = np.matmul(a.data.astype(exact), b.data.astype(exact))
        return interpreter.TensorHandle((product + d.data).astype(d.data.dtype), d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


if not GPU:
    _ordered_dots()

DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPE = torch.bfloat16 if GPU else torch.float16  # the interpreter's bf16 dot is wrong
FORMATS = ("bf16", "int8", "fp8", "int4", "nvfp4")


def make_weight(kind: str, *shape: int, seed: int = 0) -> Weight:
    """A random weight of variance about 1 / K in any format."""
    g = torch.Generator(device=DEVICE).manual_seed(seed)
    lead, (n, k) = shape[:-2], shape[-2:]
    std = k**-0.5

    def ints(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high, (*lead, *size), generator=g, device=DEVICE)

    def near(value: float, *size: int) -> Tensor:
        return value * (0.75 + 0.5 * torch.rand((*lead, *size), generator=g, device=DEVICE))

    if kind == "bf16":
        return (torch.randn((*lead, n, k), generator=g, device=DEVICE) * std).to(DTYPE)
    if kind == "int8":
        return Int8Weight(ints(-127, 128, n, k).to(torch.int8), near(std / 73, n))
    if kind == "fp8":
        q = torch.randn((*lead, n, k), generator=g, device=DEVICE).mul(50).to(torch.float8_e4m3fn)
        return Fp8Weight(q, near(std / 50, -(-n // 128), -(-k // 128)))
    if kind == "int4":
        q = (ints(0, 256, n, k // 2)).to(torch.uint8)
        return Int4Weight(q, near(std / 4.6, n, k // 128).to(DTYPE), None, 128)
    scale = near(8.0, n, k // 16).to(torch.float8_e4m3fn)
    return Nvfp4Weight(ints(0, 256, n, k // 2).to(torch.uint8), scale, near(std / 8 / 2.9))


def rows(*shape: int, seed: int = 1, scale: float = 1.0) -> Tensor:
    g = torch.Generator(device=DEVICE).manual_seed(seed)
    return (torch.randn(shape, generator=g, device=DEVICE) * scale).to(DTYPE)


def assert_close(got: Tensor, want: Tensor, rel_rms: float = 5e-3) -> None:
    """Relative root mean square error (on a GPU, where activations are bf16, up to 1e-2); NaN never passes."""
    rel_rms = max(rel_rms, 1e-2) if GPU else rel_rms
    got, want = got.float(), want.float()
    assert got.shape == want.shape
    assert torch.isfinite(got).all(), "an output was not written, or is not finite"
    error = (got - want).square().mean().sqrt() / want.square().mean().sqrt().clamp(min=1e-12)
    assert error <= rel_rms, f"relative RMS {float(error):.2e} above {rel_rms:.0e}"
