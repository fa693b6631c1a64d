"""What is measured and checked on a GPU; `__main__` says how."""
