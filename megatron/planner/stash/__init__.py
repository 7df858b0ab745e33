"""Plans the paged stash before a run: how often its pages run out, and which size factors are sufficient."""
