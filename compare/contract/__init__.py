"""The protocol of a run: the request, the record, and the observations of a step."""
