"""Commands of `shardpair`: one file or one folder each."""
