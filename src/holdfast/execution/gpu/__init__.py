"""Execution on one NVIDIA GPU: state of the slots on the device, the decoder, graphs, the KV range, and the runner.

Imported only when a GPU is used. What to hold and what to compute is decided elsewhere, as on a CPU.
"""
