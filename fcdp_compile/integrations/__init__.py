"""fcdp inside of other people's training loops, one module for each."""
