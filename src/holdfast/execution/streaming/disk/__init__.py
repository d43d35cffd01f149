"""Layers that wait on a disk, and rows of an embedding there: the file, and what is read from it ahead of need."""
