"""Jobs of clusters and clouds: a manifest for a recipe, filled from its plan."""
