"""Where vLLM keeps its entry points, for commands that name them. Owns nothing."""
