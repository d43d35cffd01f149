"""What other engines support: architectures, kernels by GPU, and how releases divide memory."""
