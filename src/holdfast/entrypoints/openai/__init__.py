"""Where vLLM keeps its OpenAI server, for commands that name it. Owns nothing."""
