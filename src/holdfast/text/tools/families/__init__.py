"""How families of models write calls of tools: one file a way of writing."""
