"""What can be wrong with the machine rather than with the experiment. Imports no JAX."""


class MissingDevicesError(RuntimeError):
    """This machine lacks the devices that a layout needs. The message is one line with both numbers."""
