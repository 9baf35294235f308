"""Language models with a key-value cache: their files, step by step, beside torch."""
