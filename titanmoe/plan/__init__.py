"""Memory, time and the best mapping of a recipe on hardware that is not there: closed formulas, without torch."""
