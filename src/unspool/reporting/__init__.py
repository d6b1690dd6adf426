"""One self-contained HTML page from the result files of a run."""
