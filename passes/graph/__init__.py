"""Tools of the passes: nodes, views, transfers and repetitions of a graph."""
