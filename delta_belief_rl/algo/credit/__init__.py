"""Credit assignment: reward channels of a turn table to advantages. NumPy only."""
