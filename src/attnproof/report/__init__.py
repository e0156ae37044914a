"""Reports: they read records and plain data, and compute nothing."""
