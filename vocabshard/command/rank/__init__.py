"""A directory of its own, so that running the script in it puts nothing else on the path of imports."""
