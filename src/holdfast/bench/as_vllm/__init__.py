"""vLLM's `bench serve`, `throughput` and `latency`: its words, its result keys. The work is Holdfast's own."""
