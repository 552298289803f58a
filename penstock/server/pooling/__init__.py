"""Endpoints of pooling models: embeddings, classification, scores, reranking."""
