"""Set-up of all tests, before torch and triton are imported by any.

One thread each: the models are tiny, and waiting for a busy core costs more than it gives. Triton decides at import
whether kernels run in its interpreter: they do where there is no GPU.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
