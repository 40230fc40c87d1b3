"""One game, many games at once, and the files that keep them."""
