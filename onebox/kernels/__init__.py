"""Kernels in pairs: a Triton door beside its plain PyTorch `_ref`, same signature. A `_ref` imports torch alone."""
