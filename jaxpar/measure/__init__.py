"""What a run communicates, holds and costs."""
