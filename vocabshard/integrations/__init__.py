"""Adapters to other systems, one file each. Each imports the other project only when it is used, if at all."""
