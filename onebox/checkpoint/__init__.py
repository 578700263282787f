"""Published weights -> weight containers, and -> one hybrid checkpoint."""
