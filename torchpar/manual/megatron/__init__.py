"""Helpers of tensor parallelism by hand: Megatron's mappings, split parameters, vocabulary."""
