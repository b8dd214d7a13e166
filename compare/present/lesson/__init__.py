"""The page of a lesson: one strategy in four engines, from the tree and from one real run."""
