"""Build a corpus: tokenized documents in Arrow files, made by a datatrove pipeline."""
