"""Theory of a layout, one short function for each thing."""
