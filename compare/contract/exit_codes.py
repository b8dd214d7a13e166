"""Exit codes of an engine's process."""

DONE, FAILED = 0, 1
BAD_REQUEST = 2
"""What was asked for, or what an input is like, cannot be: nothing was trained."""
MISSING = 3
"""Devices or packages."""
STOPPED = 4
"""Not finished, as somebody asked; nothing is wrong."""
MEANT = frozenset({BAD_REQUEST, MISSING, STOPPED})
"""Those that say more than that it failed."""
