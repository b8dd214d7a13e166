"""What a loss does with a layout's edits, read from its jaxpr."""
