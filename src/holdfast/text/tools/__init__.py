"""Tools: how a model is told of them, how its calls are read, and how they are held to a form."""
