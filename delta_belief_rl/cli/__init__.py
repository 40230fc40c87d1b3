"""The console script ``delta-belief`` and its verbs, one module each."""
