"""Judgement of runs: the ladder, its tolerances, costs, closed forms."""
