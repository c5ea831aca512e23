"""Training: the loop over epochs, the optimiser step, loaders, checkpoints and the log."""
