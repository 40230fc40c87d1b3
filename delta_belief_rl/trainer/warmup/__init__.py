"""Supervised warm-up of the embedded agent on games of a teacher."""
