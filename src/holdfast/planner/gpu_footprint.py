"""What this engine allocates on a GPU beside weights and KV, for limits: execution takes its sizes from here.

Pure arithmetic: no torch, no triton.
"""

from __future__ import annotations

from holdfast.units import MIB

SKINNY_ROWS = 8
"""Up to so many rows, products with a dense matrix come from a kernel of our own."""
SKINNY_BLOCK_ROWS = 16
"""The same with quantized blocks, for which cuBLAS would need them expanded first."""
EXPANDED_BYTES = 64 * MIB
"""Of the tile that quantized matrices are expanded to, for products with many rows."""
