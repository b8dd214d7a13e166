"""From a request to running ranks, and watching over them."""
