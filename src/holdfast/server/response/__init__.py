"""From the engine's output to what a client is sent, whole or streamed."""
