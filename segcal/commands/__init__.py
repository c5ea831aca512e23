"""The commands of `segcal`, one module each; `segcal.cli` lists them."""
