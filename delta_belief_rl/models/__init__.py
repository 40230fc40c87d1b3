"""Models: loading, adapters, packed and cached attention, log-probabilities at chosen positions."""
