"""The LSTM recurrence: see api.py."""
