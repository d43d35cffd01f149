"""What the machine has."""

from holdfast.hardware.kernels import compiled_kernels, processor
from holdfast.hardware.probe import (
    Memory,
    Processor,
    Resident,
    memory,
    memory_holders,
    resident,
    resident_tree,
)

__all__ = [
    "Memory",
    "Processor",
    "Resident",
    "compiled_kernels",
    "memory",
    "memory_holders",
    "processor",
    "resident",
    "resident_tree",
]
