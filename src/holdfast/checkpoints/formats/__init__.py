"""How tensors are stored: GGUF, safetensors, and quantized layouts."""
