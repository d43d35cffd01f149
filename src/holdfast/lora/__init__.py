"""Where vLLM keeps the names of LoRA, for code that imports them from there. Owns nothing."""
