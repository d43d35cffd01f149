"""Chat templates: messages rendered to a prompt by Jinja, with what a template may cost bounded and counted."""
