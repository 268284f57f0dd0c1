"""Text to integers to batches, in NumPy: vocab, corpus, builders, batches."""
