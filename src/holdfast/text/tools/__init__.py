"""Tools: how the prompt describes them, how calls are parsed, and the grammar that constrains them."""
