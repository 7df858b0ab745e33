"""Embeddings of tokens and positions."""
