"""Raw text to tokenized documents (corpus) to fixed-length rows, and the order rows are trained in."""
