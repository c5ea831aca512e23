"""One module a benchmark: `add_arguments(parser)` and `run(arguments)`; see tools/bench.py."""
