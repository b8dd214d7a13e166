"""Mesh and collectives."""
