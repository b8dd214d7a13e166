"""What is shown of results: tables, pictures, pages."""
