"""One short loop: a stage from a mix of rows to a checkpoint, resumable at any moment."""
