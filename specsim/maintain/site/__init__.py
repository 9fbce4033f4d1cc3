"""Sources of the documentation site: pages of the repository and generated pages, written for Sphinx."""
