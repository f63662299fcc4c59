"""One parameter: how it is cut, the DTensor that holds a cut, and the mesh it is cut over."""
