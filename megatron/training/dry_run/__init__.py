"""Plans of runs before they are paid for: what ranks hold, from the code of the run itself without memory."""
