"""HTTP -> requests, tokens -> HTTP."""
