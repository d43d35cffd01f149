"""Layers that do not stay where they are computed: kept in pinned memory or in a file, brought into slots just before
they are computed."""
