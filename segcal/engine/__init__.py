"""Training and evaluating: the loops around models, losses and meters."""
