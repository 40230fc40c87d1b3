"""Processes, their placement and their calls; the one room that knows Ray."""
