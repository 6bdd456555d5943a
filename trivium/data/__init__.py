"""Documents to `Batch`: source, split, pack."""
