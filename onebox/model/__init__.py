"""Token ids -> logits. Knows shapes, not requests."""
