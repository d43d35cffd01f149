"""Ranks of one model on several machines: the head (rank 0's process) awaits the other nodes, each has an agent."""
