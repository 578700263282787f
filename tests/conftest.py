"""Set-up of all tests. One thread each: the models are tiny, and waiting for a busy core costs more than it gives."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
