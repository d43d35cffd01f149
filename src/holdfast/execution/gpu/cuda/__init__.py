"""Kernels in CUDA C++, for what Triton cannot say: operands of tensor cores decoded in the registers they are read
from. Compiled on the machine that runs them. Import the modules by name: this package imports nothing."""
