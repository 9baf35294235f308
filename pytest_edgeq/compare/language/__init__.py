"""
Run language models that have a key-value cache, and compare them with torch.

`model` holds the files, `layout` recognizes their signatures, `stepping` feeds tokens and the cache
on, `runner` measures sequences by position, `generation` compares greedy tokens, `encoder_decoder`
runs files with `encode` and `decode`.
"""
