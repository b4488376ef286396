"""Measurements of a fleet's parts, each against a peer or a bound of the same run. Knows no command line."""
