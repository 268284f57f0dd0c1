"""Models along their training, side by side: see run.py."""
