"""Loss terms on packed tokens, and their aggregation."""
