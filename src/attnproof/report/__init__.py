"""Reports: they read records and compute nothing."""
