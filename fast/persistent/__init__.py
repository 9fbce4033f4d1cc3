"""A decode or verify forward of the target as one resident kernel on a Hopper GPU."""
