"""Megatron's mappings f and g, and what is split over the vocabulary."""
