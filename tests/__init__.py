"""Tests of megatron; `python -m pytest` from the repository root runs them."""
