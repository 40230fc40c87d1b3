"""Environments: one game each, single-use. ``trainer.environments`` names those of the package."""
