"""The endpoints of models that pool: embeddings, classes, scores, reranking."""
