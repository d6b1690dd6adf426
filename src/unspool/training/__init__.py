"""Training of one stage: from a mix of datasets to a checkpoint, resumable at any moment."""
