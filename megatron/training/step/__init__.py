"""One training step: passes, statistics over ranks, update, and the expert memory that a discarded step grows."""
