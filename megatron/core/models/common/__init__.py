"""Parts that several kinds of models share."""
