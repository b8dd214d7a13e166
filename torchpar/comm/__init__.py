"""Ranks, meshes, process groups and collectives."""
