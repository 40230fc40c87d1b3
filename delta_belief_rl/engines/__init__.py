"""Policy engines: from a token stream to sampled tokens and their log-probs."""
