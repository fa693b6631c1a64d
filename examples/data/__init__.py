"""Text and categories to train on, read from what is installed with sparsejax."""
