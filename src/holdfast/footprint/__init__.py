"""What a model takes in memory, term by term: weights, KV pages, workspaces. Execution allocates from it."""
