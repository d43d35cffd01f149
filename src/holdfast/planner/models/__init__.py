"""From what a user names to a model that can be counted: files, hub, catalogue, quantized variants."""
