"""The contract: what an experiment is, and what a run of it leaves behind. Imports no framework."""
