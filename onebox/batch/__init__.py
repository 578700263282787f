"""Many requests from a file, in OpenAI's batch format: each answered once, whatever happens in between."""
