"""GPT: decoder-only language models."""
