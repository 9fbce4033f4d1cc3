"""Studies, recordings and predictions of acceptance."""
