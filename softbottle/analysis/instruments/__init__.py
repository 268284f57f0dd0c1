"""A measure on arrays each: numbers, and a section of the report."""
