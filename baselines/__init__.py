"""Baselines, one file per baseline, and what several of them share."""
