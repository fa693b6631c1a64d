"""What is read from a state: metrics, and whether replicas are equal."""
