"""The protocol of a run: the request, the record that it leaves, and what is observed meanwhile."""
