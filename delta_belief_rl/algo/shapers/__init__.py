"""What happened in a game, as named reward channels."""
