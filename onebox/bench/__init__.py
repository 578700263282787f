"""Claims to evidence: each benchmark prints what it measured and appends JSON lines to results/."""
