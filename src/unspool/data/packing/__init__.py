"""Pack tokenized documents into sequences of a fixed length."""
