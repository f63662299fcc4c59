"""Running a benchmark: arguments, the matrix of cells, jobs, workers, networks."""
