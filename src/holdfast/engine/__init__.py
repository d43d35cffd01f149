"""From requests to streamed outputs: the engine process, its client, and `LLM`."""
