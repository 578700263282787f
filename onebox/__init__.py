"""onebox: serve Qwen3.5 / Qwen3.6 mixture-of-experts models from one box, and shorten prompts with reasons."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import onebox.config  # noqa: F401 - before torch, for how its threads wait

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from onebox.llm import LLM, SamplingParams


def __getattr__(name: str) -> Any:
    """The offline API, loaded when it is first asked for: torch takes seconds."""
    if name in ("LLM", "SamplingParams"):
        from onebox import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'onebox' has no attribute {name!r}")
