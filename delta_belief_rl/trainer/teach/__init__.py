"""A small language model learns to answer an embedded world's questions as its judge."""
