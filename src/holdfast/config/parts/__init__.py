"""Settings of the engine that belong together, declared and checked by themselves."""
