"""The benchmarks of tools/bench.py, one module each: `add_arguments(parser)`, `run(arguments)`."""
