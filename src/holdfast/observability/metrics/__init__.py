"""Prometheus metrics under vLLM's names."""
