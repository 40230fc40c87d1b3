"""The embedded world: its table, its language, exact knowledge and players."""
