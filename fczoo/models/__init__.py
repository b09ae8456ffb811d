"""Models that runs leave behind: saving, loading, predictions and evaluation."""
