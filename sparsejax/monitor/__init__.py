"""Functions that read a state: metrics, and the comparison of replicas."""
