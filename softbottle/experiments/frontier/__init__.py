"""Heads by what they cost: see run.py."""
