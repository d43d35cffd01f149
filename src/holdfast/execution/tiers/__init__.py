"""KV pages between the pool, RAM and a store on disk, beside the steps that a runner computes."""
