"""Where newer vLLM keeps names of its engine, for code that imports them from there. Owns nothing."""
