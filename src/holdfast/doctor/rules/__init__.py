"""The rules, which are data, and how they are loaded and matched."""
