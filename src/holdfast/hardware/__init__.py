"""What the machine has."""

from holdfast.hardware.kernels import compiled_kernels, processor
from holdfast.hardware.probe import (
    Memory,
    MemoryHolder,
    Processor,
    Resident,
    family_bytes,
    filesystem_type,
    largest_holders,
    memory,
    memory_holders,
    resident,
    resident_tree,
)

__all__ = [
    "Memory",
    "MemoryHolder",
    "Processor",
    "Resident",
    "compiled_kernels",
    "family_bytes",
    "filesystem_type",
    "largest_holders",
    "memory",
    "memory_holders",
    "processor",
    "resident",
    "resident_tree",
]
