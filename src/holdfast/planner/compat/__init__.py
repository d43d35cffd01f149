"""What other engines support on which GPU, and how releases of vLLM divide memory."""
