"""Other heads on a model that exists: see run.py."""
