"""The engines, declared: each once, with its side, what it offers, what it refuses and why."""
