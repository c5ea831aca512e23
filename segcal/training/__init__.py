"""Training: the loop over epochs, the optimizer step, loaders, checkpoints and the log."""
