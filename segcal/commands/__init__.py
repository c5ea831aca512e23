"""The commands that look at networks: eval, report and export; `segcal.cli` lists them all."""
