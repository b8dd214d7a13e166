"""Step time and memory of layouts on machines that need not be here: `shardpair plan`."""
