"""The same of ranks on GPUs: not proven, and refused unless HOLDFAST_RANK_GPUS names the GPU of each."""
