"""Turn text into token ids with the model's own tokenizer, by the fastest exact route."""
