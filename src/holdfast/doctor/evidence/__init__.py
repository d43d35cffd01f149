"""What a log says of the server: arguments, state, throughput, errors of our own."""
