"""The parts of benchmarks/compare.py: megacore and its peers on one workload, every rank a process of its own."""
