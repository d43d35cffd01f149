"""Requests and responses as the API has them."""
