"""What is printed, and the bundle, without secrets."""
