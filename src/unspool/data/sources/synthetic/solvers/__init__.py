"""One solver per task: reads a document's text alone and works out every answer in its own way."""
