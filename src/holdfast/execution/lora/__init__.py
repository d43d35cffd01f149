"""LoRA adapters: slots, files, upload, and products."""
