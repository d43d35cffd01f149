"""Requests on the way in, and their outputs on the way out."""
