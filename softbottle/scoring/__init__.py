"""What a trained model is used for: dynamic evaluation, generation, export."""
