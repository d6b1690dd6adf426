"""Studies: train one recipe in several arms with several seeds, and compare the results with statistical tests."""
