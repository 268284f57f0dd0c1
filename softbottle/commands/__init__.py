"""The commands: a file's flags, what it does, and the docstring that --help shows.

`softbottle NAME`, `python -m softbottle NAME` and `python launch/NAME.py` are the same.
Flags are absl's and belong to the process, so a process imports one of these files.
"""
