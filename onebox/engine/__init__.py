"""Requests -> tokens, one step at a time. Never sees text or HTTP."""
