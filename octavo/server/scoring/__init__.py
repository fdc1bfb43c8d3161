"""Routes for classification, scoring and reranking."""
