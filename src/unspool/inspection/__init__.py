"""See inside corpora, rows and plain input files: in the terminal, as one HTML page, as JSON."""
