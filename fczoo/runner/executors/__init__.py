"""Executors of runs: cores of this machine, Slurm and Ray."""
