"""Long instruction data: questions, retrieved passages and summaries that a language model writes about documents."""
