"""Pure functions that score outputs against references, and measure how scores change with length."""
