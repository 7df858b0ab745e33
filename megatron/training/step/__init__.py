"""One training step: passes, statistics over ranks, update; and the memory of experts that it may have to grow."""
