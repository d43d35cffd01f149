"""Commands of what is stored on this machine, models and KV pages: one module a command."""
