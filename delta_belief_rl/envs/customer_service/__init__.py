"""Customer Service: the game, its data and how its texts are read."""
