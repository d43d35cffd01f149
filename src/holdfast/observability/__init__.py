"""Logs, metrics, error codes, the memory ledger."""
