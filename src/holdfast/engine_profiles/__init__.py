"""What is known of each engine (vLLM, SGLang, llama.cpp, TGI, Ollama, Holdfast), as data: one profile an engine."""
