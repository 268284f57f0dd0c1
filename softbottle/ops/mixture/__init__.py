"""The mixture likelihood: see api.py."""
