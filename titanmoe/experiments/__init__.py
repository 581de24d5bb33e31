"""Components that no machine they are made for has run: named by the table of their kind, imported by nothing."""
