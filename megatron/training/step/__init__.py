"""Implements a training step: passes, statistics over ranks, update, and expert memory, which grows after overflows."""
