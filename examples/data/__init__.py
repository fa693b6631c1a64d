"""Text and categories to train on, read from the packages installed with sparsejax."""
