"""Tools of the passes: nodes, views, transfers and what repeats in a graph."""
