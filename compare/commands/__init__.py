"""One file for each command of `shardpair`."""
