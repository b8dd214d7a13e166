"""One self-contained HTML page for a finished comparison."""
