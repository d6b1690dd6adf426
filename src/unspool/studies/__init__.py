"""Studies: one recipe in several arms and seeds, compared with tests."""
