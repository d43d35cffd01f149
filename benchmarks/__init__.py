"""Measurements beside the peers. Not installed with the package."""
