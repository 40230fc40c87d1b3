"""User Personalization: the judge by rules and the script of one that is a model."""
