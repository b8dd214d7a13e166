"""Theory of a layout: bytes sent, bytes held, operations."""
