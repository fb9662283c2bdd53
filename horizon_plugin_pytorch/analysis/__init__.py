"""What a model does, as rows, tables and files."""
