"""The part of a machine, or of several, that an engine, a node or a rank is planned for."""
