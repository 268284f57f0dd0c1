"""The papers' tables: see run.py."""
