"""The outside world: engines, launchers, datasets, scorers."""
