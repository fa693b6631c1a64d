"""What transformations keep: by rank, its specs on a mesh, and its metrics."""
