"""The engine process and whoever runs it: protocol, heartbeat, restarts, quarantine."""
