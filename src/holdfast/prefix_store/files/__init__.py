"""What lies on the disk: the folder, its lock and numbers, indexes, slots, and how pages are checked."""
