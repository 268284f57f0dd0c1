"""A cache of earlier states joined to a mixture, and its ranking loss."""
