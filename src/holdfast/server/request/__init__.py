"""From a body to a generation request: prompts, templates, tools, structured output."""
