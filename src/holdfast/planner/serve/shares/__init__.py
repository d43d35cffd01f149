"""The part of a machine, or of several, that an engine or a node is planned for."""
