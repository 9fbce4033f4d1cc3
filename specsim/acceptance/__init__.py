"""Studies, recordings and predictions of how many drafts are accepted."""
