"""Layers that do not stay in memory: kept in a file, read into slots just before they are computed."""
