"""Which tasks a step plays."""
