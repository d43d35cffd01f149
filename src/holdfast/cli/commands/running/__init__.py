"""Commands of servers that run: one module a command."""
