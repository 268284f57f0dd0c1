"""Instruments that show the bottleneck, on plain arrays."""
