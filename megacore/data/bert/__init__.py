"""Samples for BERT: sentence pairs or packed documents, and their masks."""
