"""Everything that touches tensors: weights, kernels, the decoder, the KV pages, sampling, the runner.

Import the modules by name; importing this package alone does not import torch.
"""
