"""What the training model is asked about finished games."""
