"""The loop inside the engine process: scheduler, runner, structured output."""
