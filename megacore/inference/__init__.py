"""A trained model in use: text generation and filling masks."""
