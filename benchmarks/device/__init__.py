"""What a step would take of a GPU, counted from its compiled program."""
