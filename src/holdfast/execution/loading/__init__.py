"""Bytes of files on their way to a device."""
