"""Save checkpoints and resume from them."""
