"""Triton kernels, each behind a plain function of tensors. Import the modules by name: this package imports nothing.

They are meant for CUDA; with TRITON_INTERPRET=1 set before triton is imported they run on a CPU, slowly.
"""
