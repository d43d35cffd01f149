"""LoRA adapters as PEFT stores them."""
