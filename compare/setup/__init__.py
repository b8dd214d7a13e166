"""Preparation of a study: presets, grids of cases, engines that fit, weights to start from."""
