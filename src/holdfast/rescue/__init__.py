"""Runs a server, and restarts it with a fix when it dies."""
