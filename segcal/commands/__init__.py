"""The commands of `segcal`, one file each; `segcal.cli` lists them."""
