"""Endpoints that want vectors, classes or scores of prompts, and no answers."""
