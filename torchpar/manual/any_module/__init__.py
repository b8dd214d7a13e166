"""Service for any module, beside the lessons."""
