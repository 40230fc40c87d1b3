"""The belief in the hidden answer: asking for it, scoring it, and rewards from its changes."""
