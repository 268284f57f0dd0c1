"""Where states, tables and texts come from: runs, pretrained models, files."""
