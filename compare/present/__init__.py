"""Presentation of results: tables, pictures, pages."""
