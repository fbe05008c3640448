"""Reference networks and their registry; importing this package imports no torch."""
