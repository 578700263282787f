"""onebox: serve Qwen3.5 / Qwen3.6 mixture-of-experts models from one box, and shorten prompts with reasons."""

__version__ = "0.1.0"
