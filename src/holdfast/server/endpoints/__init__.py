"""Endpoints other than generation."""
