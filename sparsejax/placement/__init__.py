"""Where states lie: the specs of a chain, its first state, and the setup of a job."""
