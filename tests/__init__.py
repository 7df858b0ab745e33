"""Tests of megatron. Run them with `python -m pytest` from the repository root."""
