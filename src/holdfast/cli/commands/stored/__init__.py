"""Commands of the models on this machine: one module a command."""
