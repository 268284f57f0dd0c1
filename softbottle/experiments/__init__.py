"""Experiments: several models compared, or one beside a truth that is known."""
