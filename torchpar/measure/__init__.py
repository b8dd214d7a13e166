"""Communication and memory of a step."""
