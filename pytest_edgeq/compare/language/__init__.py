"""Run language models that have a key-value cache, and compare them with torch."""
