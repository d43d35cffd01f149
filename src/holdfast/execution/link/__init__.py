"""In which order bytes cross a link."""
