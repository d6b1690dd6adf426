"""Pack tokenized documents into rows of a fixed length."""
