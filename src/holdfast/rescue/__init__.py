"""Runs a server, and starts it again with what it died of fixed."""
