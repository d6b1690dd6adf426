"""Try RoPE methods on one model and one text: the same windows for all, with or without a short training."""
