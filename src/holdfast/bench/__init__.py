"""Load on any server with the OpenAI API, what it did under it, and a verdict."""
