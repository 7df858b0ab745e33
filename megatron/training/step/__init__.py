"""Implements one training step: forward and backward passes, statistics over ranks, update, and expert memory, which
grows after an overflow.
"""
