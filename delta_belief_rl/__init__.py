"""Reinforcement learning for agents that gather information over many turns."""
