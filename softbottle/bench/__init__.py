"""Timings: what a step costs and where the time goes."""
