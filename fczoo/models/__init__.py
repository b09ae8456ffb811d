"""Stored models of runs: saving, loading, prediction, evaluation and export."""
