"""From raw text to tokenized documents (corpus), to fixed-length rows, to the order of training rows."""
