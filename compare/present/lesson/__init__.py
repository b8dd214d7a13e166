"""The page of a lesson: one strategy in every engine, from the tree and from one real run."""
