"""Other libraries' entry points, served by ours. Nothing here is imported unless it is asked for."""
