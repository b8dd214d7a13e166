"""What it takes to serve any module, beside the lessons."""
